"""Addition of sparse values to a dense array. Contract: csrc/kernels/scatter_add.h."""

from __future__ import annotations

from typing import Any

import pycomm._native as _native
from pycomm.kernels.arrays import Scratch


def scatter_add(out: Any, indices: Any, values: Any, scale: Any = 1.0, *, scratch: Scratch | None = None) -> None:
    """Do ``out[indices[j]] += values[j] * scale`` for ascending ``j``; repeated indices add up.

    Args:
        out: contiguous floating array, read as flat. indices: int32, as many as ``values``.
        values: floating array.
        scale: a number, or an array of one float32, also on the GPU, that is read when the kernel runs.
        scratch: see :class:`Scratch`.

    Raises:
        TypeError: wrong dtype. ValueError: lengths differ, or an index lies outside ``out`` (then
        nothing is written). On a GPU the call returns before that is known: a later call of any
        kernel raises the error, or this one if ``PYCOMM_SYNC=1`` is set.
    """
    _native.scatter_add(out, indices, values, scale, scratch)
