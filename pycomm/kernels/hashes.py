"""Hashes of many arrays. Contract: csrc/kernels/hashes.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm.kernels.arrays import one_for_each
from pycomm.kernels.scratch import Scratch
from pycomm.kernels.threads import num_threads


def hashes(tensors: Sequence[Any], *, out: Any = None, scratch: Scratch | None = None) -> Any:
    """Return a 64-bit hash of each of ``tensors``: an int64 array on their device, one element for each.

    Equal for equal elements in logical order, wherever they lie and on whatever device. Bits are compared:
    0 and -0 differ, and so may two NaNs. Against errors, not against forgers.

    Args:
        tensors: arrays of any of float32, float16, bfloat16, float64, int8, uint8, int32, int64, all on
            one device.
        out: the array to write to and return; a new one if ``None``.
        scratch: see :class:`Scratch`.

    Raises:
        TypeError: wrong dtype. ValueError: tensors on several devices, or ``out`` has another length.
    """
    out = one_for_each(tensors, "int64", out)
    _native.hashes(tensors, out, scratch, num_threads())
    return out
