"""Random entries, the same on all ranks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.feedback import FeedbackExchange, FeedbackMethod, PlainWire, Sums
from pycomm.compression.quantised import seed_of
from pycomm.compression.report import Report
from pycomm.compression.settings import require_flag, require_integer, require_ratio
from pycomm.compression.summed import Addends

_BITS = 31  # of a random number: products with the size of a stratum stay below 2**62


class RandomWire(PlainWire):
    """One entry of each of k strata, of almost equal size, of every parameter: k distinct ones, in order.

    Args:
        unbiased: what is sent is multiplied by the size of its stratum, so that its expectation is the
            gradient.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, ratio: float, seed: int, unbiased: bool) -> None:
        super().__init__()
        begins, sizes, offset = [], [], 0
        for n in bucket.numels:
            k = max(1, round(ratio * n))
            borders = torch.arange(k + 1, dtype=torch.int64) * n // k
            begins.append(borders[:-1] + offset)
            sizes.append(borders[1:] - borders[:-1])
            offset += n
        self._begins = torch.cat(begins).to(bucket.device)
        self._sizes = torch.cat(sizes).to(bucket.device)
        self._addends = Addends(bucket, communicator, len(self._begins))
        self._seed = seed_of(seed, 0, bucket)  # rank 0's for all
        self._unbiased = unbiased
        self._indices = self._begins

    def begin(self, number: int | torch.Tensor) -> None:
        self._indices = self._begins + (self._random(number) * self._sizes >> _BITS)

    def send(self, sums: Sums, codes: torch.Tensor) -> Report:
        values = sums.flat[self._indices]
        sums.flat[self._indices] = 0.0
        self._addends.values.copy_(values * self._sizes if self._unbiased else values)
        self.bytes_sent += self._addends.num_bytes
        return self._addends.all_reduce(codes)

    def _random(self, number: int | torch.Tensor) -> torch.Tensor:
        """For every stratum a number in [0, 2**31), by the seed and the number of the step alone."""
        x = torch.arange(len(self._begins), dtype=torch.int64, device=self._begins.device)
        x = _mixed(x + _mixed(torch.as_tensor(number, device=x.device) + self._seed))
        return torch.bitwise_and(x, 2**_BITS - 1)

    def largest(self) -> torch.Tensor:
        largest: torch.Tensor = kernels.absmax([self._addends.values])
        return largest.double()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        out.zero_()
        out[self._indices] = self._addends.values * factor


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Steele, Lea and Flood's "splitmix" (2014) on int64, which wraps around; shifts are logical."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 2**37 - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 2**33 - 1)


@dataclass(frozen=True)
class RandomK(FeedbackMethod):
    """k random entries per parameter, k = max(1, round(ratio * n)), the same on all ranks, so that they are summed.

    4 bytes per entry, and no indices (Stich et al., "Sparsified SGD with Memory", 2018). Each entry is
    the random one of a stretch of n / k.

    Args:
        ratio: fraction of the entries to send, in (0, 1].
        error_feedback: keep what was not sent and add it to the next gradient. Without it entries are
            sent times n / k, which makes them unbiased.
        seed: of the random numbers, equal on all ranks. They follow from it and the number of the step.

    Raises:
        TypeError, ValueError: ``ratio`` or ``seed`` out of range.
    """

    ratio: float
    _: KW_ONLY
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require_ratio(self.ratio)
        require_flag("error_feedback", self.error_feedback)
        require_integer("seed", self.seed, 0)

    def make(self, bucket: Bucket, communicator: Communicator) -> FeedbackExchange:
        wire = RandomWire(bucket, communicator, self.ratio, self.seed, unbiased=not self.error_feedback)
        return FeedbackExchange(bucket, communicator, wire, self.error_feedback)
