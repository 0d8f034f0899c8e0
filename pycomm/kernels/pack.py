"""Packing many arrays into one and back, cast and scaled on the way. Contract: csrc/kernels/pack.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm.kernels.arrays import Scratch, empty, num_threads


def pack(
    tensors: Sequence[Any],
    out: Any,
    scale: Any = 1.0,
    *,
    limit: float = math.inf,
    unless: Any = None,
    scratch: Scratch | None = None,
) -> Any:
    """Write ``tensors`` one after the other into ``out``, each element times ``scale``, cast.

    Args:
        tensors: at least one array of float32, float16, bfloat16 or float64, any shapes.
        out: contiguous array of one of these dtypes with as many elements as all of ``tensors``.
        scale: a number, or an array of one float32, also on the GPU, that is read when the kernel runs; or a
            :class:`FittingScale`. Computed in float32, in float64 where either side is float64.
        limit: magnitudes that reach it, before the cast, count as not finite.
        unless: a 0-d bool array on ``out``'s device; if it is true, nothing is written.
        scratch: see :class:`Scratch`. With it, calls on a GPU with the same ``tensors`` do not send
            their addresses again.

    Returns:
        A 0-d bool array on ``out``'s device: whether everything *written* is finite (an overflow
        in the cast makes it false) and below ``limit``.

    Raises:
        TypeError: a wrong dtype or no array. ValueError: ``tensors`` is empty, sizes do not match,
        ``out`` is not contiguous or read-only.
    """
    finite = empty(out, (), "bool")
    _native.pack(tensors, out, scale, limit, finite, unless, scratch, num_threads())
    return finite


def pack_flagged(
    tensors: Sequence[Any],
    has_data: Sequence[bool],
    out: Any,
    flags: Any,
    bits: Any = None,
    scale: Any = 1.0,
    *,
    limit: float = math.inf,
    skip: tuple[int, int] = (0, 0),
    scratch: Scratch | None = None,
) -> None:
    """Pack as :func:`pack` does, and write ``flags`` with the same kernel.

    Args:
        tensors, out, scale, limit, scratch: see :func:`pack`.
        has_data: for each tensor, whether it is read; zeros stand for the others.
        flags: array of ``out``'s dtype for ones and zeros: each of ``has_data``; whether not all is finite and below
            ``limit``; ``bits``, and ``bits`` inverted.
        bits: bool array; ``None``: zeros are written in both places.
        skip: bounds of the elements of ``out`` for which nothing is read or written; only in CPU memory.

    Raises:
        TypeError, ValueError: as :func:`pack`, or sizes do not match.
    """
    _native.pack_flagged(tensors, has_data, out, flags, bits, scale, limit, skip, scratch, num_threads())


def unpack(flat: Any, tensors: Sequence[Any], scale: Any = 1.0, *, scratch: Scratch | None = None) -> None:
    """Fill ``tensors`` from ``flat``, times ``scale``, cast: the inverse of :func:`pack`.

    Raises:
        TypeError, ValueError: as :func:`pack`.
    """
    _native.unpack(flat, tensors, scale, scratch, num_threads())
