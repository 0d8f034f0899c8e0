"""Random entries, the same on all ranks."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch

from pycomm import checks
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.codec import Accumulated, BaseCodec, seed_of
from pycomm.compression.feedback import CodecMethod, check_ratio
from pycomm.compression.messages import SummedMessage
from pycomm.compression.report import Report, Told

_BITS = 31  # of a random number, so that products with the size of a stratum stay below 2**62


class RandomCodec(BaseCodec):
    """Codec of a random entry of each of k strata, almost equal in size, of every parameter: k distinct ones, in order.

    Args:
        unbiased: multiply what is sent by the size of its stratum, so that its expectation is the
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
        self._message = SummedMessage(bucket, communicator, len(self._begins))
        self._seed = seed_of(seed, 0, bucket)  # rank 0's for all
        self._unbiased = unbiased
        self._indices = self._begins

    def begin(self, step: int | torch.Tensor) -> None:
        self._indices = self._begins + (self._random(step) * self._sizes >> _BITS)

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        flat = accumulated.flat
        values = flat[self._indices]
        flat[self._indices] = 0.0
        self._message.values.copy_(values * self._sizes if self._unbiased else values)
        self.bytes_sent += self._message.num_bytes
        return self._message.all_reduce(told)

    def _random(self, step: int | torch.Tensor) -> torch.Tensor:
        """Return a number in [0, 2**31) for every stratum, which depends on the seed and ``step`` only."""
        x = torch.arange(len(self._begins), dtype=torch.int64, device=self._begins.device)
        x = _mixed(x + _mixed(torch.as_tensor(step, device=x.device) + self._seed))
        return torch.bitwise_and(x, 2**_BITS - 1)

    def largest(self) -> torch.Tensor:
        return self._message.largest()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        out.zero_()
        out[self._indices] = self._message.values * factor


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Apply Steele, Lea and Flood's "splitmix" (2014) to int64 numbers, which wrap around; shifts are logical."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 2**37 - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 2**33 - 1)


@dataclass(frozen=True)
class RandomK(CodecMethod):
    """k random entries per parameter, k = max(1, round(ratio * n)), the same on all ranks, so that they are summed.

    4 bytes per entry, and no indices (Stich et al., "Sparsified SGD with Memory", 2018). One entry is
    drawn out of every n / k consecutive ones.

    Args:
        ratio: fraction of the entries to send, in (0, 1].
        error_feedback: keep what was not sent and add it to the next gradient. Without it entries are
            sent times n / k, which makes them unbiased.
        seed: seed of the random numbers, equal on all ranks; they depend on it and the number of the step.

    Raises:
        TypeError, ValueError: ``ratio`` or ``seed`` is out of range.
    """

    ratio: float
    _: KW_ONLY
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        checks.flag("error_feedback", self.error_feedback)
        checks.integer("seed", self.seed, 0)

    def codec(self, bucket: Bucket, communicator: Communicator) -> RandomCodec:
        return RandomCodec(bucket, communicator, self.ratio, self.seed, unbiased=not self.error_feedback)
