"""Exact selection by magnitude. Contract: csrc/kernels/topk.h."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycomm import _native
from pycomm.kernels.arrays import like
from pycomm.kernels.threads import num_threads


def topk(x: Any, k: int, out: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """The ``k`` elements of ``x`` of largest magnitude, exactly.

    Args:
        x: array of float32, float16, bfloat16 or float64, read as flat; at most 2**31 - 1 elements.
        k: 1 <= k <= number of elements.
        out: ``(values, indices)`` to write to, contiguous, of ``k`` elements each.

    Returns:
        ``(values, indices)``: ``indices`` int32, ascending, into flat ``x``; ``values`` those
        elements, signs kept, ``x``'s dtype. Ties go to the lowest index; NaN ranks above inf.

    Raises:
        TypeError: wrong dtype. ValueError: ``k`` out of range, ``x`` too large.
    """
    if out is None:
        # A k out of range is refused by the kernel; it must not fail here first, in an allocation.
        length = k if 0 <= k <= _num_elements(x) else 0
        out = like(x, length), like(x, length, "int32")
    values, indices = out
    _native.topk(x, k, values, indices, num_threads())
    return values, indices


def _num_elements(x: Any) -> int:
    size = 1
    for length in x.shape if hasattr(x, "shape") else np.shape(x):
        size *= length
    return size
