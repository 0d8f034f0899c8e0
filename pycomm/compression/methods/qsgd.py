"""Stochastic quantization without bias."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from pycomm import checks, kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.quantized import QuantizedCodec


@dataclass(frozen=True)
class QSGD(CodecMethod):
    """Magnitudes as 0 ... ``levels`` parts of a block's Euclidean length, rounded up or down by chance, without bias.

    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
    section 3, in blocks of 512 elements (its "buckets"). The variance of a block is at most
    ``min(512 / levels**2, sqrt(512) / levels)`` times its squared length. Codes have 2 bits for one
    level, 4 for up to 7, 8 for up to 127, signs included.

    Unbiased as it is, it keeps no residual: with few levels the variance is above the gradient itself,
    and error feedback of that does not converge.

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
