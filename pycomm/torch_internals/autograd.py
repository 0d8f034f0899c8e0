"""Autograd's passes and hooks, and the stream that a hook runs on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.autograd import Variable

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward pass that is running on this thread; -1 outside one."""


def current_node() -> Any:
    """Return the node that autograd is evaluating on this thread; ``None`` outside one."""
    return torch._C._current_autograd_node()


@functools.cache
def calls_hooks_of_running_nodes() -> bool:
    """Return whether torch calls a hook added to a node during its evaluation; torch 2.4 does not."""
    called: list[bool] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            current_node().register_hook(lambda *_: called.append(True))
            return grad

    with torch.enable_grad():
        result: Any = Node.apply(torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]
    torch.autograd.backward(result)
    return bool(called)


raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)
"""Returns the current stream of the GPU of that ordinal as an integer (``cudaStream_t``), without Python code."""


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Queue ``callback``, to be called when the running backward pass has computed everything."""
    Variable._execution_engine.queue_callback(callback)


def accumulation_hooks(param: torch.Tensor) -> MutableMapping[int, Any]:
    """Return the post-accumulate-grad hooks of ``param``, by id, in order."""
    hooks: MutableMapping[int, Any] | None = getattr(param, "_post_accumulate_grad_hooks", None)
    return hooks or {}


def compiles_autograd() -> bool:
    """Return whether compiled autograd runs this backward pass."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return torch.compiler.is_compiling() or bool(getattr(compiled, "in_compiled_autograd_region", False))
