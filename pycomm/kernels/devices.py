"""GPUs that the kernels can use."""

from __future__ import annotations

import pycomm._native as _native


def cuda_devices() -> tuple[int, str]:
    """Return how many GPUs the kernels can use and, if none, why and what to install. Never raises."""
    return _native.cuda_devices()
