"""Tracing: fake tensors, compiled code, profiling, and FLOPs that torch's counter omits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a context in which new tensors have shapes, storages and a graph, but no memory and no values."""
    return FakeTensorMode()


def is_profiling() -> bool:
    """Return whether a profiler of torch's is running, of this thread or of all."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def profiled_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that such a profiler shows as a range called ``name``, and ``emit_nvtx`` as one of NVTX."""
    return torch.profiler.record_function(name)


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which operations take tensors of all classes as plain ones."""
    return torch._C.DisableTorchFunctionSubclass()


def attention_flops() -> dict[Any, Callable[..., int]]:
    """Return FLOPs of the attention that CPUs run, for ``FlopCounterMode``, which knows only that of GPUs."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count  # imports triton, if there is one

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
