"""Floats as few bits, with a scale per block. Contract: csrc/kernels/quantize.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pycomm._native as _native
from pycomm import checks
from pycomm.checks import instance, pair
from pycomm.kernels.accumulate import Decay, Momentum, arguments_of
from pycomm.kernels.arrays import Scratch, empty, look, num_threads


@dataclass(frozen=True)
class Quantization:
    """Format of codes: blocks of ``block`` elements (a multiple of 64), each with a scale.

    With ``element="int"``, codes are whole numbers, by which the scale is multiplied. With "e4m3" and "e5m2" they are
    floats of 8 bits (torch's ``float8_e4m3fn`` and ``float8_e5m2``; OCP 8-bit Floating Point Specification, 2023). The
    scale is then the smallest power of two that brings the block's largest magnitude to the format's largest number,
    448 or 57344, or below it, and the other settings keep their defaults.

    Attributes:
        levels: largest whole number, at most 127.
        bits: size of a code, 2, 4 or 8; ``levels < 2 ** (bits - 1)``.
        norm: what ``levels`` times the scale is: the "max" magnitude of the block, or its "euclidean" length.
        element: "int", "e4m3" or "e5m2".
    """

    block: int = 256
    levels: int = 127
    bits: int = 8
    norm: str = "max"
    element: str = "int"

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
        seed: int64 array of two numbers: codes are then rounded stochastically, without bias, by
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
    _native.quantize(x, config, seed, scales, codes, remainder, num_threads())
    return scales, codes


def accumulate_quantized(
    acc: Any,
    residual: Any | None,
    grads: Sequence[Any],
    scale: Any,
    config: Quantization,
    parts: Sequence[tuple[int, int, Any | None, Any, Any]],
    *,
    keeps: bool = True,
    clip: float | None = None,
    momentum: Momentum | None = None,
    decay: Decay | None = None,
    scratch: Scratch | None = None,
) -> Any:
    """Do what :func:`accumulate` does, and then :func:`quantize` parts of ``acc``, on a CPU in one pass.

    Args:
        acc, residual, grads, scale, clip, momentum, decay: as for :func:`accumulate`; ``acc`` is float32.
        config: see :class:`Quantization`.
        parts: for each part, in order, the first element of ``acc`` and the end, then ``seed``, scales and codes as
            for :func:`quantize`, which starts over in each part.
        keeps: leave the quantization errors in ``acc``. Otherwise what is in the parts has no meaning afterwards.

    Returns:
        As :func:`accumulate`.

    Raises:
        TypeError, ValueError: as :func:`accumulate` and :func:`quantize`; parts overlap.
    """
    instance("config", config, Quantization)
    finite = empty(acc, (len(grads),), "bool")
    common = arguments_of(clip, acc, residual, momentum, decay, finite, scale)
    _native.accumulate_quantized(
        grads, common, config=config, parts=parts, keeps=keeps, scratch=scratch, num_threads=num_threads()
    )
    return finite


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
    _native.dequantize(scales, codes, config, out, scale, scratch, num_threads())


def requantize(
    scales: Sequence[Any],
    codes: Sequence[Any],
    config: Quantization,
    out: tuple[Any, Any],
    *,
    seed: Any | None = None,
    remainder: Any | None = None,
    count: int | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Write the scales and codes of the sum of several arrays from :func:`quantize` to ``out``.

    The same as :func:`dequantize` and :func:`quantize`, bit for bit, in one pass.

    Args:
        out: ``(scales, codes)``, as for :func:`quantize`.
        seed: as for :func:`quantize`.
        remainder: float32 array, to which the error of the second quantization is added.
        count: number of elements; needed only without a ``remainder``.

    Raises:
        TypeError, ValueError: as :func:`quantize`; neither ``remainder`` nor ``count`` is given.
    """
    instance("config", config, Quantization)
    if count is None:
        if remainder is None:
            raise ValueError("count is None, wanted the number of elements, as there is no remainder")
        count, _ = look("remainder", remainder)
    to_scales, to_codes = pair("out", out, "scales and codes")
    _native.requantize(scales, codes, count, config, seed, to_scales, to_codes, remainder, scratch, num_threads())
