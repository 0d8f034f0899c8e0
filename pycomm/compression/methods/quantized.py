"""Quantized blocks: Int8, Int4 and FP8 (nearest), QSGD and TernGrad (stochastic), and their form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from pycomm import checks, kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.codec import BaseCodec, Summands
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.two_hop import Arrays, EncodedPart, summing_codec

_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


class QuantizedForm:
    """Form of ``count`` elements as small numbers, with a scale for each block."""

    def __init__(self, config: kernels.Quantization, count: int) -> None:
        self._config = config
        codes = torch.uint8, config.code_bytes(count)
        self.arrays: Sequence[tuple[torch.dtype, int]] = [(torch.float32, config.num_blocks(count)), codes]
        self.top = _LARGEST.get(config.element, float(config.levels))
        self._scratch, self._sum_scratch = kernels.Scratch(), kernels.Scratch()

    def encode(self, x: torch.Tensor, arrays: Arrays, seed: torch.Tensor | None) -> None:
        kernels.quantize(x, self._config, (arrays[0], arrays[1]), seed=seed, remainder=x)

    def accumulate(self, parts: Sequence[EncodedPart], summands: Summands) -> torch.Tensor:
        ordered = sorted(parts, key=lambda part: part.where.start)
        coded = [(part.where.start, part.where.stop, part.seed, *part.arrays) for part in ordered]
        keeps = summands.residual is not None
        finite: torch.Tensor = kernels.accumulate_quantized(
            *summands.arrays, self._config, coded, keeps=keeps, **summands.options
        )
        return finite

    def decode(self, messages: Sequence[Arrays], out: torch.Tensor, factor: float | torch.Tensor = 1.0) -> None:
        scales, codes = zip(*messages, strict=True)
        kernels.dequantize(scales, codes, self._config, out, factor, scratch=self._scratch)

    def add_up(
        self, messages: Sequence[Arrays], arrays: Arrays, remainder: torch.Tensor, seed: torch.Tensor | None
    ) -> None:
        scales, codes = zip(*messages, strict=True)
        config, out = self._config, (arrays[0], arrays[1])
        kernels.requantize(scales, codes, config, out, seed=seed, remainder=remainder, scratch=self._sum_scratch)


class _BlockMethod(CodecMethod):
    """Base of methods whose messages are blocks of small numbers. ``seed``: seed of stochastic rounding, if any."""

    reduces_parts = True
    seed: int | None = None

    @property
    def config(self) -> kernels.Quantization:
        """The form of elements in a message."""
        raise NotImplementedError

    def codec(self, bucket: Bucket, communicator: Communicator) -> BaseCodec:
        return summing_codec(
            bucket, communicator, lambda begin, end: QuantizedForm(self.config, end - begin), self.seed
        )


def _check_blocks(block: int, error_feedback: bool) -> None:
    checks.integer("block", block, 64)
    if block % 64:
        raise ValueError(f"block is {block}, wanted a multiple of 64")
    checks.flag("error_feedback", error_feedback)


@dataclass(frozen=True, repr=False)
class Int8(_BlockMethod):
    """Blocks of elements as multiples of 1/127 of their largest magnitude, rounded to the nearest.

    8.13 bits per element, the blocks' scales included (Dettmers, "8-Bit Approximations for Parallelism in Deep
    Learning", 2015). Messages are summed as :mod:`pycomm.compression.two_hop` says.

    Args:
        error_feedback: keep what rounding left over and add it to the next gradient.
        block: number of elements with a common scale, a multiple of 64.

    Raises:
        TypeError, ValueError: a setting has the wrong type or value.
    """

    error_feedback: bool = True
    _: KW_ONLY
    block: int = 256

    def __post_init__(self) -> None:
        _check_blocks(self.block, self.error_feedback)

    def __repr__(self) -> str:
        block = "" if self.block == 256 else f", block={self.block}"  # servers compare it with older checkpoints' text
        return f"Int8(error_feedback={self.error_feedback}{block})"

    @property
    def config(self) -> kernels.Quantization:
        return kernels.Quantization(block=self.block)


@dataclass(frozen=True)
class Int4(_BlockMethod):
    """Blocks of elements as multiples of 1/7 of their largest magnitude, rounded to the nearest; two to a byte.

    4.25 bits per element, the scales included (Wang et al., "ZeRO++: Extremely Efficient Collective Communication for
    Giant Model Training", 2023, section 3.3, with error feedback). Otherwise as :class:`pycomm.Int8`.

    Args:
        block: number of elements with a common scale, a multiple of 64.
        error_feedback: keep what rounding left over and add it to the next gradient.

    Raises:
        TypeError, ValueError: a setting has the wrong type or value.
    """

    _: KW_ONLY
    block: int = 128
    error_feedback: bool = True

    def __post_init__(self) -> None:
        _check_blocks(self.block, self.error_feedback)

    @property
    def config(self) -> kernels.Quantization:
        return kernels.Quantization(block=self.block, levels=7, bits=4)


@dataclass(frozen=True)
class FP8(_BlockMethod):
    """Blocks of elements as floats of 8 bits, rounded to the nearest, with a power of two as scale.

    8.25 bits per element, the scales included. (Micikevicius et al., "FP8 Formats for Deep Learning", 2022; scales by
    block as in DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.) A scale brings the largest magnitude
    of its block into the upper half of the format's range, so nothing saturates. The bound by which an overflow of
    float16 gradients is found is therefore up to twice the largest average. Small magnitudes of a block keep more
    digits than under :class:`pycomm.Int8`, large ones fewer. Otherwise as Int8.

    Args:
        format: "e4m3", 4 bits of exponent and 3 of mantissa; or "e5m2", which has more range and fewer digits.
        block: number of elements with a common scale, a multiple of 64.
        error_feedback: keep what rounding left over and add it to the next gradient.

    Raises:
        TypeError, ValueError: a setting has the wrong type or value.
    """

    format: str = "e4m3"
    _: KW_ONLY
    block: int = 128
    error_feedback: bool = True

    def __post_init__(self) -> None:
        checks.choice("format", self.format, tuple(_LARGEST))
        _check_blocks(self.block, self.error_feedback)

    @property
    def config(self) -> kernels.Quantization:
        return kernels.Quantization(block=self.block, element=self.format)


@dataclass(frozen=True)
class QSGD(_BlockMethod):
    """Magnitudes as 0 ... ``levels`` parts of a block's Euclidean length, rounded up or down by chance, without bias.

    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
    section 3, in blocks of 512 elements (its "buckets"). The variance of a block is at most
    ``min(512 / levels**2, sqrt(512) / levels)`` times its squared length. Codes have 2 bits for one
    level, 4 for up to 7, 8 for up to 127, signs included.

    It is unbiased and keeps no residual: with few levels the variance exceeds the gradient itself, and
    error feedback does not converge.

    Args:
        levels: number of levels above 0, from 1 to 127.
        seed: seed of the random numbers, which follow from it, the rank and the number of the step.

    Raises:
        TypeError, ValueError: ``levels`` is out of range, or ``seed`` is not an integer.
    """

    levels: int = 127
    _: KW_ONLY
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("levels", self.levels, 1, 127)
        checks.integer("seed", self.seed, 0)

    @property
    def error_feedback(self) -> bool:
        return False

    @property
    def config(self) -> kernels.Quantization:
        bits = 2 if self.levels == 1 else 4 if self.levels <= 7 else 8
        return kernels.Quantization(block=512, levels=self.levels, bits=bits, norm="euclidean")


@dataclass(frozen=True)
class TernGrad(_BlockMethod):
    """Every element as -1, 0 or 1 times the largest magnitude of its block, by chance, without bias.

    Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", 2017,
    section 3.1, with a scale for every 1024 elements instead of one for a layer, which never increases
    the variance. 2.03 bits per element. Keeps no residual.

    Args:
        seed: seed of the random numbers, which follow from it, the rank and the number of the step.

    Raises:
        TypeError, ValueError: ``seed`` is not an integer, or negative.
    """

    _: KW_ONLY
    seed: int = 0

    def __post_init__(self) -> None:
        checks.integer("seed", self.seed, 0)

    @property
    def error_feedback(self) -> bool:
        return False

    @property
    def config(self) -> kernels.Quantization:
        return kernels.Quantization(block=1024, levels=1, bits=2, norm="max")
