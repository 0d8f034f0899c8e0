"""Top-k sparsification with error feedback."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from pycomm import checks
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.codec import BaseCodec
from pycomm.compression.feedback import CodecMethod, check_ratio
from pycomm.compression.sparse.codec import ENTRY_BYTES, SparseCodec, WholeCodec


@dataclass(frozen=True)
class TopK(CodecMethod):
    """The k entries of largest magnitude per parameter, k = max(1, round(ratio * n)), as index + value.

    Stich et al., "Sparsified SGD with Memory", 2018. Selection is exact: ties go to the lowest index.
    One-dimensional parameters (biases, norms) are sent dense. At a density of 0.1 % an entry takes 5.5
    bytes (3.5 with ``half_values``; 4 more for float64), 5.1 at 1 %.

    Args:
        ratio: fraction of the entries to send, in (0, 1].
        error_feedback: keep what was not sent and add it to the next gradient. Without it most
            models do not train; the switch is there for comparisons.
        half_values: send values as float16; the rounding error stays in the residual.

    Raises:
        ValueError: ``ratio`` is outside (0, 1]. TypeError: it is not a number.
    """

    ratio: float
    _: KW_ONLY
    error_feedback: bool = True
    half_values: bool = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        checks.flag("error_feedback", self.error_feedback)
        checks.flag("half_values", self.half_values)

    @property
    def sent_fraction(self) -> float:
        return min(1.0, ENTRY_BYTES * self.ratio)

    def codec(self, bucket: Bucket, communicator: Communicator) -> BaseCodec:
        if self.ratio == 1.0:
            return WholeCodec(bucket, communicator)
        return SparseCodec(bucket, communicator, lambda _: self.ratio, self.half_values)
