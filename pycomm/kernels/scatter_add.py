"""Adding sparse values to a dense array. Contract: csrc/kernels/scatter_add.h."""

from __future__ import annotations

from typing import Any

from pycomm import _native


def scatter_add(out: Any, indices: Any, values: Any, scale: float = 1.0) -> None:
    """``out[indices[j]] += values[j] * scale`` for ascending ``j``; repeated indices add up.

    Args:
        out: contiguous floating array, read as flat. indices: int32, as many as ``values``.
        values: floating array.

    Raises:
        TypeError: wrong dtype. ValueError: lengths differ, or an index lies outside ``out`` (then
        nothing is written).
    """
    _native.scatter_add(out, indices, values, scale)
