"""Codecs of TopK and DGC: the k largest sums of every parameter with their indices, or all of them.

Of two ways to sum such entries over the ranks, the one with the fewer bytes is chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pycomm import kernels
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import to_device
from pycomm.compression.base import Operation
from pycomm.compression.codec import Accumulated, BaseCodec, Outcome, Summands, wide_dtype
from pycomm.compression.messages import SummedMessage
from pycomm.compression.report import Report, Told
from pycomm.compression.sparse.sums import DenseSum, GatheredSum, Selected, entry_bytes

ENTRY_BYTES = 1.5
"""Approximate bytes of an entry, with its index, for each byte of its value."""

Density = Callable[[int | torch.Tensor], float]
"""Fraction of the entries to send, as a function of the step's number."""

SparseSum = GatheredSum | DenseSum
WAYS: dict[str, type[SparseSum]] = {"gathered": GatheredSum, "dense": DenseSum}


class SparseCodec(BaseCodec):
    """Codec that selects entries in the same pass that accumulates, and sums them over the ranks.

    Where an entry is sent, its velocity is zeroed (momentum factor masking). If the whole parameter is
    sent, velocities stay, as masking would remove all momentum.

    Args:
        half_values: send values as float16, and leave the rounding error in what was accumulated.
    """

    def __init__(self, bucket: Bucket, communicator: Communicator, density: Density, half_values: bool) -> None:
        super().__init__()
        self._bucket, self._communicator = bucket, communicator
        self._density_at, self._half_values = density, half_values
        self._density = 0.0
        self._counts: list[int] = []
        num_params = len(bucket.names)
        self._ends = to_device(torch.tensor(bucket.numels).cumsum(0), bucket.device)
        # The last step's k-th magnitudes: this step's selection begins there.
        self._thresholds = torch.zeros(num_params, dtype=torch.float32, device=bucket.device)
        self._num_selections = 0
        self._num_missed = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        self._sum: SparseSum | None = None

    def begin(self, step: int | torch.Tensor) -> None:
        density = self._density_at(step)
        if density == self._density:
            return
        bucket = self._bucket
        self._density = density
        self._counts = [max(1, round(density * n)) for n in bucket.numels]
        dtype, total = wide_dtype(bucket), sum(self._counts)
        self._values = torch.empty(total, dtype=dtype, device=bucket.device)
        self._indices = torch.empty(total, dtype=torch.int32, device=bucket.device)
        self._largest = torch.zeros(1, dtype=torch.float32, device=bucket.device) if dtype == torch.float32 else None
        self._whole = self._keeps = None
        whole = [n == k for n, k in zip(bucket.numels, self._counts, strict=True)]
        if any(whole):
            each = torch.tensor(whole)
            self._whole = to_device(each, bucket.device)
            self._keeps = to_device(each.repeat_interleave(torch.tensor(self._counts)), bucket.device)
        way = choose_way(bucket.num_elements, total, self._communicator.size, dtype, self._half_values)
        self._sum = WAYS[way](bucket, self._communicator, total, self._half_values)

    def accumulate(self, summands: Summands) -> torch.Tensor:
        out = self._values, self._indices
        acc, residual, grads, scale = summands.arrays
        options = {**summands.options, "num_missed": self._num_missed, "largest": self._largest}
        finite, _ = kernels.sparsify(acc, residual, grads, self._counts, out, self._thresholds, scale, **options)
        self._num_selections += len(self._counts)
        return finite  # type: ignore[no-any-return]

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        assert self._sum is not None
        entries, before = (self._values, self._indices, self._largest), self._sum.bytes_sent
        report = self._sum.send(Selected(accumulated, *entries, self._ends, self._whole, self._keeps), told)
        self.bytes_sent += self._sum.bytes_sent - before
        return report

    def finite(self, report: Report, accumulated: Accumulated) -> torch.Tensor:
        assert self._sum is not None
        return self._sum.finite(report, accumulated)

    def settle(self, outcome: Outcome) -> None:
        assert self._sum is not None
        self._sum.settle(outcome)

    def operations_among(self, size: int, per_host: int = 1) -> list[Operation] | None:
        bucket = self._bucket
        return operations(bucket.num_elements, sum(self._counts), size, wide_dtype(bucket), self._half_values)

    def stats(self) -> dict[str, int]:
        return {"selections": self._num_selections, "selections_missed": int(self._num_missed)}


class WholeCodec(BaseCodec):
    """Codec that sends everything as it is: compression at density 1."""

    def __init__(self, bucket: Bucket, communicator: Communicator) -> None:
        super().__init__()
        self._message = SummedMessage(bucket, communicator, bucket.num_elements)

    def send(self, accumulated: Accumulated, told: Told) -> Report:
        self._message.values.copy_(accumulated.flat)
        accumulated.flat.zero_()
        self.bytes_sent += self._message.num_bytes
        return self._message.all_reduce(told)

    def largest(self) -> torch.Tensor:
        return self._message.largest()

    def write(self, out: torch.Tensor, factor: float | torch.Tensor) -> None:
        torch.mul(self._message.values, factor, out=out)


def received_bytes(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool) -> dict[str, float]:
    """Return the bytes that a rank receives by each way if every rank has ``count`` entries; without headers."""
    others = size - 1
    return {
        "gathered": others * entry_bytes(dtype, num_elements, count, half),
        "dense": 2 * others / size * num_elements * dtype.itemsize,
    }


def choose_way(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool) -> str:
    """Return the way with the fewer bytes: a function of what all ranks know."""
    costs = received_bytes(num_elements, count, size, dtype, half)
    return min(costs, key=lambda way: costs[way])


def operations(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool) -> list[Operation]:
    """Return the collective of the way that is chosen; without headers."""
    if choose_way(num_elements, count, size, dtype, half) == "dense":
        return [Operation("all_reduce", num_elements * dtype.itemsize)]
    return [Operation("all_gather", entry_bytes(dtype, num_elements, count, half))]
