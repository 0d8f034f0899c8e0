"""Recorded steps: what a CUDA graph keeps of one, in CPU memory.

A recording holds the operations that ran, the memory of their arguments and results, and the values of numbers. To
launch it runs the same operations on whatever that memory holds by then; no code of Python's decides anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pycomm import kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.channel import Channel
from pycomm.collectives.communicator import Communicator

Kernel = Callable[..., Any]
Again = Callable[[], object]
ByDevice = Callable[[Kernel, tuple[Any, ...], dict[str, Any]], tuple[Any, Again]]
"""Runs a kernel; returns its result, and how to run it again, to the same memory."""


def on_host(kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Again]:
    result = kernel(*args, **options)
    return result, lambda: overwrite(result, kernel(*args, **options))


def overwrite(result: Any, newer: Any) -> None:
    for old, new in zip(tree_leaves(result), tree_leaves(newer), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


class RecordedStep(TorchDispatchMode):
    """Operations of torch, kernels and collectives of what runs inside :meth:`recording`."""

    def __init__(self, by_device: ByDevice = on_host) -> None:
        super().__init__()
        self._by_device = by_device
        self._work: list[Again] = []
        self._is_inside = False  # a kernel or a collective, which is recorded as a whole

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside, while torch says that it captures. It is also the first launch."""
        with pytest.MonkeyPatch.context() as context:
            for name, function in inspect.getmembers(kernels, inspect.isfunction):
                context.setattr(kernels, name, self._recorded(function, self._by_device))
            for kind, name in (
                (Communicator, "all_reduce"),
                *((Channel, name) for name in ("all_reduce", "run", "all_reduce_apart")),
            ):
                context.setattr(kind, name, self._recorded(getattr(kind, name), on_host))
            context.setattr(torch.cuda, "is_initialized", lambda: True)
            context.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with self:
                yield

    @torch.no_grad()
    def launch(self) -> None:
        for again in self._work:
            again()

    def _recorded(self, function: Kernel, run: ByDevice) -> Kernel:
        def recorded(*args: Any, **options: Any) -> Any:
            if self._is_inside:
                return function(*args, **options)
            self._is_inside = True
            try:
                result, again = run(function, args, options)
            finally:
                self._is_inside = False
            self._work.append(again)
            return result

        return recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor's value in a capture"
        result = func(*args, **options)
        is_new = "empty" in func.__name__  # memory of the graph's own, which holds what the last launch left
        if not self._is_inside and not func.is_view and not is_new:
            self._work.append(lambda: overwrite(result, func(*args, **options)))
        return result


@contextmanager
def unseen_references() -> Iterator[None]:
    """Let no bucket see that a recording refers to its memory: a graph refers to none."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(Bucket, "is_kept", lambda _: False)
        context.setattr(Bucket, "leave_to_users", lambda _: None)
        yield


class RecordedTraining:
    """Steps of a model on the batch that lies in ``x`` and ``y``."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor):
        self.model, self.optimizer, self.x, self.y = model, optimizer, x, y

    def load(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.x.copy_(batch[0])
        self.y.copy_(batch[1])

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        ((self.model(self.x) - self.y) ** 2).mean().backward()
        self.optimizer.step()
