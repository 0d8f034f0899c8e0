"""Three values."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from pycomm import checks, kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.feedback import CodecMethod
from pycomm.compression.quantized import QuantizedCodec


@dataclass(frozen=True)
class TernGrad(CodecMethod):
    """Every element as -1, 0 or 1 times the largest magnitude of its block, by chance, without bias.

    Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", 2017,
    section 3.1, with a scale for every 1024 elements instead of one for a layer, which can only make
    the variance smaller. 2.03 bits per element. Keeps no residual.

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
