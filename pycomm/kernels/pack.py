"""Many arrays into one and back, cast and scaled on the way. Contract: csrc/kernels/pack.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm import _native
from pycomm.kernels.arrays import scalar_like
from pycomm.kernels.threads import num_threads


def pack(tensors: Sequence[Any], out: Any, scale: float = 1.0) -> Any:
    """Write ``tensors`` one after the other into ``out``, each element times ``scale``, cast.

    Args:
        tensors: at least one array of float32, float16, bfloat16 or float64, any shapes.
        out: contiguous array of one of these dtypes with as many elements as all of ``tensors``.
        scale: computed in float32, in float64 where either side is float64.

    Returns:
        A 0-d bool array on ``out``'s device: whether everything *written* is finite (an overflow
        in the cast makes it false). Reading it on the host is the caller's choice.

    Raises:
        TypeError: a wrong dtype or no array. ValueError: ``tensors`` is empty, sizes do not match,
        ``out`` is not contiguous or read-only.
    """
    return scalar_like(out, _native.pack(tensors, out, scale, num_threads()))


def unpack(flat: Any, tensors: Sequence[Any], scale: float = 1.0) -> None:
    """The inverse of :func:`pack`: fill ``tensors`` from ``flat``, times ``scale``, cast.

    Raises:
        TypeError, ValueError: as :func:`pack`.
    """
    _native.unpack(flat, tensors, scale, num_threads())
