"""Autograd's passes and hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.autograd import Variable


def current_graph_task() -> int:
    """Return the id of the backward pass that is running on this thread; -1 outside one."""
    task: int = torch._C._current_graph_task_id()
    return task


def current_node() -> Any:
    """Return the node that autograd is evaluating on this thread; ``None`` outside one."""
    return torch._C._current_autograd_node()


def queue_final_callback(callback: Callable[[], None]) -> None:
    """Queue ``callback``, to be called when the running backward pass has computed everything."""
    Variable._execution_engine.queue_callback(callback)


def accumulation_hooks(param: torch.Tensor) -> MutableMapping[int, Any]:
    """Return the hooks that are called after the gradient of ``param`` was accumulated, by id, in order."""
    hooks: MutableMapping[int, Any] | None = getattr(param, "_post_accumulate_grad_hooks", None)
    return hooks or {}


def compiles_autograd() -> bool:
    """Return whether compiled autograd runs this backward pass."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return torch.compiler.is_compiling() or bool(getattr(compiled, "in_compiled_autograd_region", False))
