"""Quantized blocks: Int8 (nearest), QSGD and TernGrad (stochastic), and their codec."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from pycomm import checks, kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.codec import Accumulated, BaseCodec, seed_of, sum_of_maxima
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.messages import GatheredMessages
from pycomm.compression.report import Report, Told


class QuantizedCodec(BaseCodec):
    """Codec of blocks as small integers with a scale each, gathered and added up by every rank.

    Args:
        config: how blocks are quantized.
        seed: round stochastically, by random numbers that follow from it, the rank and the step; ``None``:
            to the nearest.
    """

    def __init__(
        self, bucket: Bucket, communicator: Communicator, config: kernels.Quantization, seed: int | None = None
    ) -> None:
        super().__init__()
        count = bucket.num_elements
        self._config = config
        self._messages = GatheredMessages(
            bucket, communicator, [(torch.float32, config.num_blocks(count)), (torch.uint8, config.code_bytes(count))]
        )
        self._seed = None
        if seed is not None:
            mixed = seed_of(seed, communicator.rank, bucket)
            self._seed = torch.tensor([mixed, 0], dtype=torch.int64, device=bucket.device)
        self._scratch = kernels.Scratch()

    def begin(self, step: int | torch.Tensor) -> None:
        if self._seed is not None:
            self._seed[1:].fill_(step)

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        flat = accumulated.flat
        scales, small = self._messages.mine
        if flat.dtype == torch.float32:
            kernels.quantize(flat, self._config, (scales, small), seed=self._seed, remainder=flat)
        else:
            sent = flat.float()
            kernels.quantize(sent, self._config, (scales, small), seed=self._seed)
            kernels.dequantize([scales], [small], self._config, sent)
            flat.sub_(sent)
        self.bytes_sent += self._messages.num_bytes
        return self._messages.gather(told)

    def largest(self) -> torch.Tensor:
        return sum_of_maxima([scales for scales, _ in self._messages.everyones]) * self._config.levels

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        scales, small = zip(*self._messages.everyones, strict=True)
        into = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        kernels.dequantize(list(scales), list(small), self._config, into, factor, scratch=self._scratch)
        if into is not out:
            out.copy_(into)


@dataclass(frozen=True)
class Int8(CodecMethod):
    """Blocks of 256 elements as multiples of 1/127 of their largest magnitude, rounded to the nearest.

    8.13 bits per element (the blocks' scales included; Dettmers, "8-Bit Approximations for Parallelism
    in Deep Learning", 2015). Every rank gathers all ranks' messages, so bytes grow with their number: use
    it with two to four ranks; with more, FP16 sends less.

    Args:
        error_feedback: keep what rounding left over and add it to the next gradient.

    Raises:
        TypeError: ``error_feedback`` is not a bool.
    """

    error_feedback: bool = True

    def __post_init__(self) -> None:
        checks.flag("error_feedback", self.error_feedback)

    def codec(self, bucket: Bucket, communicator: Communicator) -> QuantizedCodec:
        config = kernels.Quantization(block=256, levels=127, bits=8, norm="max")
        return QuantizedCodec(bucket, communicator, config)


@dataclass(frozen=True)
class QSGD(CodecMethod):
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

    def codec(self, bucket: Bucket, communicator: Communicator) -> QuantizedCodec:
        bits = 2 if self.levels == 1 else 4 if self.levels <= 7 else 8
        config = kernels.Quantization(block=512, levels=self.levels, bits=bits, norm="euclidean")
        return QuantizedCodec(bucket, communicator, config, self.seed)


@dataclass(frozen=True)
class TernGrad(CodecMethod):
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

    def codec(self, bucket: Bucket, communicator: Communicator) -> QuantizedCodec:
        config = kernels.Quantization(block=1024, levels=1, bits=2, norm="max")
        return QuantizedCodec(bucket, communicator, config, self.seed)
