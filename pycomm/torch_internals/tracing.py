"""Tracing: compiled code, transforms, profiling."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._functorch.eager_transforms


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything here: such code checks classes, and calls no hooks."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and dynamo.FRAME_COUNTER > 0


@functools.cache
def prepare_graphs(prepare: Callable[[], None]) -> None:
    """Have ``prepare`` called before each capture and each launch of a CUDA graph: a launch calls nothing in Python."""
    for name in ("capture_begin", "replay"):
        _prepare_calls(torch.cuda.CUDAGraph, name, lambda _: prepare())


@functools.cache
def prepare_transforms(prepare: Callable[[Any], None]) -> None:
    """Have ``prepare`` called with each tensor that ``torch.func`` is about to wrap, whose class it then ignores."""
    for name in ("_wrap_for_grad", "_wrap_functional_tensor"):
        _prepare_calls(torch._functorch.eager_transforms, name, prepare)


def _prepare_calls(owner: Any, name: str, prepare: Callable[[Any], None]) -> None:
    """Have ``prepare`` called with the first argument of each call of a function of ``owner``, before it."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def prepared(first: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(first)
        return function(first, *args, **kwargs)

    setattr(owner, name, prepared)


def is_profiling() -> bool:
    """Return whether a profiler of torch's is running, of this thread or of all."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def profiled_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that such a profiler shows as a range called ``name``, and ``emit_nvtx`` as one of NVTX."""
    return torch.profiler.record_function(name)


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which operations take tensors of all classes as plain ones."""
    return torch._C.DisableTorchFunctionSubclass()
