"""Exact selection by magnitude. Contract: csrc/kernels/topk.h."""

from __future__ import annotations

from typing import Any

import numpy as np

import pycomm._native as _native
from pycomm.checks import pair
from pycomm.kernels.arrays import Scratch, empty, look, num_threads


def topk(
    x: Any, k: int, out: tuple[Any, Any] | None = None, *, threshold: Any = None, scratch: Scratch | None = None
) -> tuple[Any, Any]:
    """Select exactly the ``k`` elements of ``x`` of largest magnitude.

    Args:
        x: array of float32, float16, bfloat16 or float64, read as flat; at most 2**31 - 1 elements.
        k: 1 <= k <= number of elements.
        out: ``(values, indices)`` to write to, contiguous, of ``k`` elements each.
        threshold: an array of one float32 on ``x``'s device, kept by the caller from call to call: the
            k-th magnitude of an earlier, similar ``x`` (0 for none). It saves work, is replaced by this
            ``x``'s, and never changes the result.
        scratch: see :class:`Scratch`.

    Returns:
        ``(values, indices)``: ``indices`` int32, ascending, into flat ``x``; ``values`` those
        elements, signs kept, ``x``'s dtype. Ties go to the lowest index; NaN ranks above inf.

    Raises:
        TypeError: wrong dtype. ValueError: ``k`` out of range, ``x`` too large.
    """
    if out is None:
        elements, dtype = look("x", x)
        # The kernel refuses a wrong k; an allocation must not fail first.
        length = int(k) if isinstance(k, int | np.integer) and not isinstance(k, bool) and 0 <= k <= elements else 0
        out = empty(x, (length,), dtype), empty(x, (length,), "int32")
    values, indices = pair("out", out, "values and indices")
    _native.topk(x, k, values, indices, threshold, scratch, num_threads())
    return values, indices
