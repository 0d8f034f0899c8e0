"""Which GPUs there are for the kernels."""

from __future__ import annotations

import pycomm._native as _native


def cuda_devices() -> tuple[int, str]:
    """How many GPUs the kernels can use; where there are none, also why, and what to install. Never raises."""
    return _native.cuda_devices()
