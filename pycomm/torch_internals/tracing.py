"""Tracing: compiled code, transforms, profiling."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def is_profiling() -> bool:
    """Return whether a profiler of torch's is running, of this thread or of all."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def profiled_range(name: str) -> AbstractContextManager[Any]:
    """Return a context that such a profiler shows as a range called ``name``, and ``emit_nvtx`` as one of NVTX."""
    return torch.profiler.record_function(name)


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which operations take tensors of all classes as plain ones."""
    return torch._C.DisableTorchFunctionSubclass()
