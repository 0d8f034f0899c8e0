"""Arrays that are added up over the ranks by an all-reduce, with a report behind them."""

from __future__ import annotations

import torch

from pycomm import kernels
from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.feedback import PlainWire, Sums, wide_dtype
from pycomm.compression.report import Report, SummedReport


class Addends:
    """``count`` elements in ``values``, and a report."""

    def __init__(self, bucket: Bucket, communicator: Communicator, count: int) -> None:
        self._communicator = communicator
        num_params = len(bucket.names)
        places = SummedReport.num_places(num_params, communicator.size)
        self._memory = communicator.empty(count + places, wide_dtype(bucket), bucket.device)
        self.values = self._memory[:count]
        self._report = SummedReport(self._memory[count:], num_params)

    def all_reduce(self, codes: torch.Tensor) -> Report:
        """Sum ``values`` over the ranks, in place."""
        self._report.fill(codes, self._communicator.rank)
        self._communicator.all_reduce(self._memory)
        return self._report

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes


class WholeWire(PlainWire):
    """All of the sums, as they are: what compression at density 1 comes to."""

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        super().__init__()
        self._addends = Addends(bucket, communicator, bucket.num_elements)

    def send(self, sums: Sums, codes: torch.Tensor) -> Report:
        self._addends.values.copy_(sums.flat)
        sums.flat.zero_()
        self.bytes_sent += self._addends.num_bytes
        return self._addends.all_reduce(codes)

    def largest(self) -> torch.Tensor:
        largest: torch.Tensor = kernels.absmax([self._addends.values])
        return largest.double()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        torch.mul(self._addends.values, factor, out=out)
