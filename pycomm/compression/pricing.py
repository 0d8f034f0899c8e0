"""What a method costs: rehearsed on this machine, priced on a link.

A rehearsal runs a method's own exchange on made-up gradients, with a communicator that sends nothing
and notes what would have been sent. So the cost of compressing and decompressing, for that many ranks,
is measured on the real thing, and what goes over the wire is what the method would really send.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Compression, Scaling
from pycomm.compression.feedback import FeedbackExchange
from pycomm.compression.sparse import SparseWire

_REPEATS = 3
_MOST_RANKS = 4  # with more, messages would have to be another for every rank
_ALL_REDUCE_BYTES, _ALL_GATHER_BYTES = (1 << 16, 1 << 22), (1 << 12, 1 << 18)


@dataclass(frozen=True)
class Operation:
    """A collective: "all_reduce" of so many bytes, "all_gather" of as many of each rank, "all_to_all" likewise."""

    kind: str
    num_bytes: int


class Link(Protocol):
    """How long collectives take."""

    def seconds(self, operation: Operation) -> float: ...


@dataclass
class Costs:
    """Of one reduction of a bucket.

    Attributes:
        local: seconds of work on this machine, beside communication.
        operations: what it sends.
    """

    local: float
    operations: list[Operation] = field(default_factory=list)

    def seconds(self, link: Link) -> float:
        """Work and communication, one after the other."""
        return self.local + sum(link.seconds(operation) for operation in self.operations)

    def num_bytes(self) -> int:
        """That a rank hands to the transport."""
        return sum(operation.num_bytes for operation in self.operations)


class _Rehearsal:
    """A communicator among ranks that are not there: everybody sends what this rank does."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.operations: list[Operation] = []

    def empty(self, shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def all_reduce(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto") -> None:
        self.operations.append(Operation("all_reduce", x.nbytes))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.operations.append(Operation("all_gather", x.nbytes))
        out.view(self.size, -1).copy_(x)


def rehearse(method: Compression, params: Sequence[torch.Tensor], size: int) -> Costs:
    """What a bucket of ``params`` costs a rank of ``size``, by ``method``: medians of a few steps after the first.

    Rehearsed are at most four ranks. What is gathered of more takes as much longer to decompress as four
    do than two.
    """
    small = min(size, _MOST_RANKS)
    local, operations = _rehearse(method, params, small, size)
    if size > small and any(operation.kind == "all_gather" for operation in operations):
        fewer, _ = _rehearse(method, params, 2, 2)
        if all(operation.kind == "all_gather" for operation in operations):  # of balanced sums there are not more
            local += max(0.0, local - fewer) / (small - 2) * (size - small)
    return Costs(local, operations)


def _rehearse(
    method: Compression, params: Sequence[torch.Tensor], size: int, real_size: int
) -> tuple[float, list[Operation]]:
    stage = _Rehearsal(size)
    communicator = cast(Communicator, stage)
    bucket = Bucket([str(i) for i in range(len(params))], params, communicator)
    exchange = method.make(bucket, communicator)
    generator = torch.Generator(params[0].device).manual_seed(0)
    seconds = []
    for step in range(1 + _REPEATS):
        grads: list[Any] = [
            torch.randn(p.shape, generator=generator, device=p.device, dtype=torch.float32).to(p.dtype) for p in params
        ]
        stage.operations.clear()
        _finish_on(bucket)
        start = time.perf_counter()
        exchange.exchange(grads, Scaling(size, number=1 << 40))  # after any warm-up
        exchange.finish(exchange.finite() if method.transactional else True)
        _finish_on(bucket)
        if step > 0:  # the first one allocates, and has no threshold to go by
            seconds.append(time.perf_counter() - start)
    if isinstance(exchange, FeedbackExchange) and isinstance(exchange.wire, SparseWire):
        operations = [Operation(*each) for each in exchange.wire.operations_among(real_size)]
    else:
        operations = list(stage.operations)
    return statistics.median(seconds), operations


def _finish_on(bucket: Bucket) -> None:
    if bucket.on_gpu:
        torch.cuda.synchronize(bucket.device)


@dataclass(frozen=True)
class Line:
    """``start`` seconds and ``per_byte`` more for each byte."""

    start: float
    per_byte: float

    def at(self, num_bytes: int) -> float:
        return self.start + self.per_byte * num_bytes

    @staticmethod
    def through(sizes: tuple[int, int], seconds: Sequence[float]) -> Line:
        """Two points; noise must not make anything take less than nothing."""
        slope = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
        return Line(max(0.0, seconds[0] - slope * sizes[0]), slope)


@dataclass(frozen=True)
class MeasuredLink:
    """Lines through what two sizes took."""

    all_reduce: Line
    all_gather: Line
    size: int

    def seconds(self, operation: Operation) -> float:
        if operation.kind == "all_reduce":
            return self.all_reduce.at(operation.num_bytes)
        # A rank receives P - 1 pieces in an all_to_all, as in an all_gather of pieces.
        piece = operation.num_bytes // self.size if operation.kind == "all_to_all" else operation.num_bytes
        return self.all_gather.at(piece)


def measure_link(communicator: Communicator, device: torch.device) -> MeasuredLink:
    """By a few collectives on ``device``, the slowest rank's medians: equal on all ranks. Collective."""
    medians = []
    for sizes, gathers in ((_ALL_REDUCE_BYTES, False), (_ALL_GATHER_BYTES, True)):
        for num_bytes in sizes:
            x = communicator.empty(num_bytes // 4, torch.float32, device).fill_(1.0)
            out = torch.empty(communicator.size * len(x), dtype=x.dtype, device=device)
            medians.append(statistics.median(_time(communicator, x, out, gathers) for _ in range(_REPEATS)))
    slowest = agreed(communicator, medians)
    return MeasuredLink(
        Line.through(_ALL_REDUCE_BYTES, slowest[:2]), Line.through(_ALL_GATHER_BYTES, slowest[2:]), communicator.size
    )


def agreed(communicator: Communicator, seconds: Sequence[float]) -> list[float]:
    """The largest of each, over all ranks. Collective."""
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
