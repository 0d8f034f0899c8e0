"""Eight bits per element."""

from __future__ import annotations

from dataclasses import dataclass

from pycomm import checks, kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.quantized import QuantizedCodec


@dataclass(frozen=True)
class Int8(CodecMethod):
    """Blocks of 256 elements as multiples of 1/127 of their largest magnitude, rounded to the nearest.

    8.13 bits per element (the blocks' scales included; Dettmers, "8-Bit Approximations for Parallelism
    in Deep Learning", 2015). Every rank gathers every other's, so bytes grow with the ranks: for two to
    four, above that FP16 sends less.

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
