"""Pricing: a method is rehearsed on this machine, and its communication priced on a link.

A rehearsal runs a method's own exchange on random gradients, with a communicator that sends nothing and
records what would have been sent. So the real code gives both the time of compressing and decompressing,
and the collectives.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Compression, Operation, Scaling

_REPEATS = 3
_MOST_RANKS = 4  # to rehearse with; the rest is extrapolated
_ALL_REDUCE_BYTES, _ALL_GATHER_BYTES = (1 << 16, 1 << 22), (1 << 12, 1 << 18)


class PricedLink(Protocol):
    """Link that collectives can be priced on."""

    def seconds(self, operation: Operation) -> float:
        """Return how long ``operation`` takes."""


@dataclass
class Costs:
    """Costs of one reduction of a bucket.

    Attributes:
        local: seconds of work on this machine, besides communication.
        operations: the collectives.
    """

    local: float
    operations: list[Operation] = field(default_factory=list)

    def seconds(self, link: PricedLink) -> float:
        """Return the time of work and communication, one after the other."""
        return self.local + sum(link.seconds(operation) for operation in self.operations)

    def num_bytes(self, size: int) -> float:
        """Return how many bytes each of ``size`` ranks hands to the transport for others."""
        shares = {"all_to_all": (size - 1) / size}  # one part is its own
        return sum(operation.num_bytes * shares.get(operation.kind, 1.0) for operation in self.operations)


class _Rehearsal:
    """Communicator of simulated ranks, each on a host of its own, all of which send the same as this rank."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.hosts = [(p,) for p in range(size)]
        self.operations: list[Operation] = []

    def own_share(self, x: torch.Tensor, algorithm: str) -> None:
        pass  # there is no shared memory, which would save copies

    def empty(self, shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def all_reduce(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto") -> None:
        self.operations.append(Operation("all_reduce", x.nbytes))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.operations.append(Operation("all_gather", x.nbytes))
        out.view(self.size, -1).copy_(x)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.operations.append(Operation("all_to_all", x.nbytes))
        out.view(self.size, -1).copy_(x.view(self.size, -1)[0])


def rehearse(method: Compression, params: Sequence[torch.Tensor], size: int) -> Costs:
    """Return what a bucket of ``params`` costs each of ``size`` ranks by ``method``: medians of a few steps.

    At most four ranks are rehearsed. For methods that only gather messages, each further rank adds half of the
    difference between four ranks and two.
    """
    small = min(size, _MOST_RANKS)
    local, operations = _rehearse(method, params, small, size)
    if size > small and any(operation.kind == "all_gather" for operation in operations):
        fewer, _ = _rehearse(method, params, 2, 2)
        if all(operation.kind == "all_gather" for operation in operations):  # balanced sums do not grow with the ranks
            local += max(0.0, local - fewer) / (small - 2) * (size - small)
    return Costs(local, operations)


def _rehearse(
    method: Compression, params: Sequence[torch.Tensor], size: int, real_size: int
) -> tuple[float, list[Operation]]:
    rehearsal = _Rehearsal(size)
    communicator = cast(Communicator, rehearsal)
    bucket = Bucket([str(i) for i in range(len(params))], params, communicator)
    exchange = method.make(bucket, communicator)
    generator = torch.Generator(params[0].device).manual_seed(0)
    seconds = []
    for step in range(1 + _REPEATS):
        grads: list[Any] = [
            torch.randn(p.shape, generator=generator, device=p.device, dtype=torch.float32).to(p.dtype) for p in params
        ]
        rehearsal.operations.clear()
        _synchronize(bucket)
        start = time.perf_counter()
        exchange.exchange(grads, Scaling(size, step=1 << 40))  # after any warm-up
        exchange.finish(exchange.finite() if method.transactional else True)
        _synchronize(bucket)
        if step > 0:  # the first step allocates, and has no threshold to start from
            seconds.append(time.perf_counter() - start)
    operations = exchange.operations_among(real_size)
    return statistics.median(seconds), list(rehearsal.operations) if operations is None else operations


def _synchronize(bucket: Bucket) -> None:
    if bucket.on_gpu:
        torch.cuda.synchronize(bucket.device)


@dataclass(frozen=True)
class PricedLine:
    """Time as a line over bytes: ``start`` seconds, and ``per_byte`` more for each byte."""

    start: float
    per_byte: float

    def at(self, num_bytes: int) -> float:
        """Return the seconds for ``num_bytes``."""
        return self.start + self.per_byte * num_bytes

    @staticmethod
    def through(sizes: tuple[int, int], seconds: Sequence[float]) -> PricedLine:
        """Return the line through two points, without negative times, which noise might cause."""
        slope = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
        return PricedLine(max(0.0, seconds[0] - slope * sizes[0]), slope)


@dataclass(frozen=True)
class MeasuredLink:
    """Link whose times are lines through the measured times of two sizes."""

    all_reduce: PricedLine
    all_gather: PricedLine
    size: int

    def seconds(self, operation: Operation) -> float:
        if operation.kind == "all_reduce":
            return self.all_reduce.at(operation.num_bytes)
        # A rank receives P - 1 pieces in an all_to_all, as in an all_gather of pieces.
        piece = operation.num_bytes // self.size if operation.kind == "all_to_all" else operation.num_bytes
        return self.all_gather.at(piece)


def measure_link(communicator: Communicator, device: torch.device) -> MeasuredLink:
    """Time a few collectives on ``device``: the slowest rank's medians, the same on all ranks. Collective."""
    medians = []
    for sizes, gathers in ((_ALL_REDUCE_BYTES, False), (_ALL_GATHER_BYTES, True)):
        for num_bytes in sizes:
            x = communicator.empty(num_bytes // 4, torch.float32, device).fill_(1.0)
            out = torch.empty(communicator.size * len(x), dtype=x.dtype, device=device)
            medians.append(statistics.median(_time(communicator, x, out, gathers) for _ in range(_REPEATS)))
    slowest = agreed(communicator, medians)
    return MeasuredLink(
        PricedLine.through(_ALL_REDUCE_BYTES, slowest[:2]),
        PricedLine.through(_ALL_GATHER_BYTES, slowest[2:]),
        communicator.size,
    )


def agreed(communicator: Communicator, seconds: Sequence[float]) -> list[float]:
    """Return the largest of each of ``seconds`` over all ranks. Collective."""
    tensor = torch.tensor(seconds, dtype=torch.float64)
    communicator.all_reduce(tensor, "max")
    slowest: list[float] = tensor.tolist()
    return slowest


def _time(communicator: Communicator, x: torch.Tensor, out: torch.Tensor, gathers: bool) -> float:
    communicator.barrier()
    start = time.perf_counter()
    if gathers:
        communicator.all_gather(out, x)
    else:
        communicator.all_reduce(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
