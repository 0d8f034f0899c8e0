"""Floats as small integers with a scale per block. Contract: csrc/kernels/quantize.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm import checks
from pycomm.checks import instance, pair
from pycomm.kernels.arrays import empty, look
from pycomm.kernels.resources import Scratch, num_threads


@dataclass(frozen=True)
class Quantization:
    """Format of codes: blocks of ``block`` elements (a multiple of 64), magnitudes as multiples of the block's scale.

    Attributes:
        levels: largest multiple, at most 127.
        bits: size of a code, 2, 4 or 8; ``levels < 2 ** (bits - 1)``.
        norm: what ``levels`` times the scale is: the "max" magnitude of the block, or its "euclidean" length.
    """

    block: int = 256
    levels: int = 127
    bits: int = 8
    norm: str = "max"

    def num_blocks(self, count: int) -> int:
        """Return the number of blocks of ``count`` elements."""
        return -(-checks.count("count", count, 0) // checks.count("block", self.block, 1))

    def code_bytes(self, count: int) -> int:
        """Return the number of bytes that the codes of ``count`` elements take."""
        bits = checks.count("bits", self.bits, 1)
        if bits not in (2, 4, 8):
            raise ValueError(f"bits is {bits}, wanted 2, 4 or 8")
        return -(-checks.count("count", count, 0) * bits // 8)


def quantize(
    x: Any,
    config: Quantization,
    out: tuple[Any, Any] | None = None,
    *,
    seed: Any | None = None,
    remainder: Any | None = None,
) -> tuple[Any, Any]:
    """Return the scales of the blocks of ``x`` and the codes of its elements.

    Args:
        x: float32 array.
        config: see :class:`Quantization`.
        out: ``(scales, codes)`` to write to: float32, one per block; uint8, ``config.code_bytes``.
        seed: int64 array of two numbers: levels are then rounded stochastically, without bias, by
            random numbers that follow from them and the position alone. ``None``: to the nearest.
        remainder: float32 array of ``x``'s size, which may be ``x``: receives the quantization error.

    Returns:
        ``(scales, codes)``.

    Raises:
        TypeError, ValueError: a wrong dtype or size, settings out of range.
    """
    instance("config", config, Quantization)
    if out is None:
        count, _ = look("x", x)
        out = empty(x, (config.num_blocks(count),), "float32"), empty(x, (config.code_bytes(count),), "uint8")
    scales, codes = pair("out", out, "scales and codes")
    _native.quantize(
        x, config.block, config.levels, config.bits, config.norm, seed, scales, codes, remainder, num_threads()
    )
    return scales, codes


def dequantize(
    scales: Sequence[Any],
    codes: Sequence[Any],
    config: Quantization,
    out: Any,
    scale: Any = 1.0,
    *,
    scratch: Scratch | None = None,
) -> None:
    """Write the sum of several arrays from :func:`quantize`, times ``scale``, to ``out`` (float32).

    Raises:
        TypeError, ValueError: as :func:`quantize`.
    """
    instance("config", config, Quantization)
    settings = (config.block, config.levels, config.bits, config.norm)
    _native.dequantize(scales, codes, *settings, out, scale, scratch, num_threads())
