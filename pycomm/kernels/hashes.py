"""Hashes of many arrays. Contract: csrc/kernels/hashes.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm.kernels.arrays import Scratch, num_threads, one_for_each


def hashes(tensors: Sequence[Any], *, out: Any = None, scratch: Scratch | None = None) -> Any:
    """Return a 64-bit hash of each of ``tensors``: an int64 array on their device, one element for each.

    Equal elements in the same logical order give equal hashes, for any strides and on any device. Bits
    count: 0 and -0 differ, and so may two NaNs. Detects errors; does not resist forgery.

    Args:
        tensors: arrays of float32, float16, bfloat16, float64, int8, uint8, int32 or int64, all on one
            device.
        out: the array to write to and return; a new one if ``None``.
        scratch: see :class:`Scratch`.

    Raises:
        TypeError: wrong dtype. ValueError: tensors on several devices, or ``out`` has another length.
    """
    out = one_for_each(tensors, "int64", out)
    _native.hashes(tensors, out, scratch, num_threads())
    return out
