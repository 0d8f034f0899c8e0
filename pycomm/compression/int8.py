"""Eight bits per element."""

from __future__ import annotations

from dataclasses import dataclass

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.feedback import FeedbackExchange, FeedbackMethod
from pycomm.compression.quantised import QuantisedWire
from pycomm.compression.settings import require_flag


@dataclass(frozen=True)
class Int8(FeedbackMethod):
    """Blocks of 256 elements as multiples of 1/127 of their largest magnitude, rounded to the nearest.

    8.13 bits per element (the blocks' scales included; Dettmers, "8-Bit Approximations for Parallelism
    in Deep Learning", 2015). Every rank gathers every other's, so bytes grow with the ranks: for two to
    four, above that FP16 sends less.

    Args:
        error_feedback: keep what rounding left over and add it to the next gradient.

    Raises:
        TypeError: ``error_feedback`` is no bool.
    """

    error_feedback: bool = True

    def __post_init__(self) -> None:
        require_flag("error_feedback", self.error_feedback)

    def make(self, bucket: Bucket, communicator: Communicator) -> FeedbackExchange:
        how = kernels.Quantization(block=256, levels=127, bits=8, norm="max")
        return FeedbackExchange(bucket, communicator, QuantisedWire(bucket, communicator, how), self.error_feedback)
