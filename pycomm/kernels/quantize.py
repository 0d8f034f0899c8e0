"""Floats as small integers with a scale per block. Contract: csrc/kernels/quantize.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm import checks
from pycomm.checks import instance, pair
from pycomm.kernels.arrays import empty, look
from pycomm.kernels.scratch import Scratch
from pycomm.kernels.threads import num_threads


@dataclass(frozen=True)
class Quantization:
    """How: blocks of ``block`` elements (a multiple of 64), magnitudes as 0 ... ``levels`` times a unit.

    Attributes:
        levels: at most 127. bits: of a code, 2, 4 or 8; ``levels < 2 ** (bits - 1)``.
        norm: what ``levels`` units are: the "max" magnitude of the block, or its "euclidean" length.
    """

    block: int = 256
    levels: int = 127
    bits: int = 8
    norm: str = "max"

    def num_blocks(self, count: int) -> int:
        """Of ``count`` elements."""
        return -(-checks.count("count", count, 0) // checks.count("block", self.block, 1))

    def code_bytes(self, count: int) -> int:
        """That the codes of ``count`` elements take."""
        bits = checks.count("bits", self.bits, 1)
        if bits not in (2, 4, 8):
            raise ValueError(f"bits is {bits}, wanted 2, 4 or 8")
        return -(-checks.count("count", count, 0) * bits // 8)


def quantize(
    x: Any,
    how: Quantization,
    out: tuple[Any, Any] | None = None,
    *,
    seed: Any | None = None,
    remainder: Any | None = None,
) -> tuple[Any, Any]:
    """The units of the blocks of ``x`` and the codes of its elements.

    Args:
        x: float32 array. how: see :class:`Quantization`.
        out: ``(units, codes)`` to write to: float32, one per block; uint8, ``how.code_bytes``.
        seed: int64 array of two numbers: levels are then rounded stochastically, without bias, by
            random numbers that follow from them and the position alone. ``None``: to the nearest.
        remainder: float32 array of ``x``'s size, ``x`` itself even: is given what the codes leave over.

    Returns:
        ``(units, codes)``.

    Raises:
        TypeError, ValueError: a wrong dtype or size, settings out of range.
    """
    instance("how", how, Quantization)
    if out is None:
        count, _ = look("x", x)
        out = empty(x, (how.num_blocks(count),), "float32"), empty(x, (how.code_bytes(count),), "uint8")
    units, codes = pair("out", out, "units and codes")
    _native.quantize(x, how.block, how.levels, how.bits, how.norm, seed, units, codes, remainder, num_threads())
    return units, codes


def dequantize(
    units: Sequence[Any],
    codes: Sequence[Any],
    how: Quantization,
    out: Any,
    scale: Any = 1.0,
    *,
    scratch: Scratch | None = None,
) -> None:
    """Write the sum of several arrays that :func:`quantize` took apart, times ``scale``, to ``out`` (float32).

    Raises:
        TypeError, ValueError: as :func:`quantize`.
    """
    instance("how", how, Quantization)
    settings = (how.block, how.levels, how.bits, how.norm)
    _native.dequantize(units, codes, *settings, out, scale, scratch, num_threads())
