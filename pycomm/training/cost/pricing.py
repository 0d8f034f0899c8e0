"""Pricing: a method is rehearsed on this machine, and its communication priced on a link.

A rehearsal runs a method's own exchange on random gradients, with a communicator that sends nothing and
records what would have been sent. So the real code gives both the time of compressing and decompressing,
and the collectives.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Compression, Operation, Scaling

CLEARLY_FASTER = 0.8
"""Fraction of another method's time that a method must stay below to be used instead: one that loses more changes the
training, and measurements are noisy."""

_REPEATS = 3
_MOST_RANKS = 4  # to rehearse with; the rest is extrapolated
_ALL_REDUCE_BYTES, _ALL_GATHER_BYTES = (1 << 16, 1 << 22), (1 << 12, 1 << 18)
_LESS_BYTES = (1 << 16, 1 << 18), (1 << 12, 1 << 17)
_SLOW = 1e-2
"""Seconds of an all-reduce of 256 KiB from which on a link is measured once, with fewer bytes: it takes long."""


class PricedLink(Protocol):
    """Link that collectives can be priced on."""

    def seconds(self, operation: Operation) -> float:
        """Return how long ``operation`` takes."""


@dataclass
class Costs:
    """Costs of one reduction of a bucket.

    Attributes:
        local: seconds of work on this machine, without communication.
        operations: the collectives.
    """

    local: float
    operations: list[Operation] = field(default_factory=list)

    def seconds(self, link: PricedLink) -> float:
        """Return the time of work and communication, one after the other."""
        return self.local + sum(link.seconds(operation) for operation in self.operations)

    def scaled(self, factor: float) -> Costs:
        """Return the costs of ``factor`` times as many gradients, otherwise equal."""
        operations = [replace(each, num_bytes=round(each.num_bytes * factor)) for each in self.operations]
        return Costs(self.local * factor, operations)

    def num_bytes(self, size: int) -> float:
        """Return how many bytes each of ``size`` ranks hands to the transport for others."""

        def share(operation: Operation) -> float:
            if operation.kind == "reduce_on_host":
                return 0.0  # others read it where it lies
            return 1.0 - operation.lanes / size if operation.kind == "all_to_all" else 1.0  # one part is its own

        return sum(operation.num_bytes * share(operation) for operation in self.operations)


class _Rehearsal:
    """Communicator of simulated ranks on hosts of ``per_host`` each, all of which send the same as this rank."""

    def __init__(self, size: int, per_host: int) -> None:
        self.rank, self.size = 0, size
        self.hosts = [tuple(range(first, first + per_host)) for first in range(0, size, per_host)]
        self.channel = self
        self.operations: list[Operation] = []

    def run(self, operation: str, async_op: bool, *args: Any) -> None:
        """Stand in for the channel's operations that the communicator itself does not have."""
        if operation == "reduce_on_host":
            self.operations.append(Operation(operation, sum(part.nbytes for part in args[0])))
            return
        assert operation == "all_to_all_v", operation
        outs, xs = ([x for x in each if x is not None] for each in args)
        self.operations.append(Operation("all_to_all", sum(x.nbytes for x in xs), self.size // len(xs)))
        for out in outs:
            out.copy_(xs[0])

    def own_share(self, x: torch.Tensor, algorithm: str) -> None:
        pass  # there is no shared memory, which would save copies

    def empty(
        self, shape: int, dtype: torch.dtype, device: torch.device | None = None, *, symmetric: bool = False
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def all_reduce(self, x: torch.Tensor, op: str = "sum", algorithm: str = "auto") -> None:
        self.operations.append(Operation("all_reduce", x.nbytes))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.operations.append(Operation("all_gather", x.nbytes))
        for part in out.view(self.size, -1):
            if part.data_ptr() != x.data_ptr():
                part.copy_(x)

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.operations.append(Operation("all_to_all", x.nbytes))
        out.view(self.size, -1).copy_(x.view(self.size, -1)[0])


def rehearse(
    method: Compression, params: Sequence[torch.Tensor], size: int, per_host: int = 1, *, repeats: int = _REPEATS
) -> Costs:
    """Return what a bucket of ``params`` costs each of ``size`` ranks by ``method``: medians of ``repeats`` steps.

    ``per_host`` ranks share a host. At most four ranks, or hosts where their ranks add up first, are rehearsed. For
    methods that only gather messages, each further rank adds half of the difference between four ranks and two.
    """
    if size % per_host:
        per_host = 1
    small = min(size, _MOST_RANKS)
    local, operations = _rehearse(method, params, small, size, per_host, repeats)
    if any(operation.kind == "reduce_on_host" for operation in operations):
        local, _ = _rehearse(method, params, min(size, _MOST_RANKS * per_host), size, per_host, repeats, on_hosts=True)
        return Costs(local, operations)
    if size > small and all(operation.kind == "all_gather" for operation in operations):
        fewer, _ = _rehearse(method, params, 2, 2, 1, repeats)
        if all(operation.kind == "all_gather" for operation in operations):  # two hops do not grow with the ranks
            local += max(0.0, local - fewer) / (small - 2) * (size - small)
    return Costs(local, operations)


def _rehearse(
    method: Compression,
    params: Sequence[torch.Tensor],
    size: int,
    real_size: int,
    per_host: int,
    repeats: int,
    *,
    on_hosts: bool = False,
) -> tuple[float, list[Operation]]:
    rehearsal = _Rehearsal(size, per_host if on_hosts else 1)
    communicator = cast(Communicator, rehearsal)
    bucket = Bucket([str(i) for i in range(len(params))], params, communicator)
    exchange = method.make(bucket, communicator)
    generator = torch.Generator(params[0].device).manual_seed(0)
    seconds = []
    for step in range(1 + repeats):
        grads: list[Any] = [
            torch.randn(p.shape, generator=generator, device=p.device, dtype=torch.float32).to(p.dtype) for p in params
        ]
        rehearsal.operations.clear()
        _synchronize(bucket)
        start = time.perf_counter()
        exchange.pack(grads, Scaling(size, step=1 << 40))  # after any warm-up
        exchange.send()
        exchange.finish(exchange.finite() if method.transactional else True)
        _synchronize(bucket)
        if step > 0:  # the first step allocates, and has no threshold to start from
            seconds.append(time.perf_counter() - start)
    operations = exchange.operations_among(real_size, per_host)
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
    """Link whose times are lines through the measured times of two sizes.

    Attributes:
        on_host: of sums over the ranks of a host; 0 where there are none.
    """

    all_reduce: PricedLine
    all_gather: PricedLine
    size: int
    on_host: PricedLine = PricedLine(0.0, 0.0)

    def seconds(self, operation: Operation) -> float:
        if operation.kind == "all_reduce":
            return self.all_reduce.at(operation.num_bytes)
        if operation.kind == "reduce_on_host":
            return self.on_host.at(operation.num_bytes)
        # A rank receives P - 1 pieces in an all_to_all, as in an all_gather of pieces; with several ranks per host, it
        # receives from its lane alone, and in an all_gather from one rank of each host.
        pieces = self.size // operation.lanes if operation.kind == "all_to_all" else 1
        return self.all_gather.at(operation.num_bytes // pieces)


def measure_link(communicator: Communicator, device: torch.device) -> MeasuredLink:
    """Time a few collectives on ``device``: the slowest rank's medians, the same on all ranks. Collective."""
    size, hosts = communicator.size, communicator.hosts
    have_hosts = device.type == "cpu" and 1 < len(hosts) < size and len({len(ranks) for ranks in hosts}) == 1

    def median(kind: str, num_bytes: int, repeats: int) -> float:
        x = communicator.empty(num_bytes // 4, torch.float32, device).fill_(1.0)
        out = torch.empty(size * len(x), dtype=x.dtype, device=device)
        return statistics.median(_time(communicator, x, out, kind) for _ in range(repeats))

    is_slow = agreed(communicator, [median("all_reduce", _LESS_BYTES[0][1], 1)])[0] >= _SLOW
    (reduced, gathered), repeats = (_LESS_BYTES, 1) if is_slow else ((_ALL_REDUCE_BYTES, _ALL_GATHER_BYTES), _REPEATS)
    timed = [("all_reduce", reduced), ("all_gather", gathered), *([("reduce_on_host", reduced)] if have_hosts else [])]
    slowest = agreed(communicator, [median(kind, each, repeats) for kind, sizes in timed for each in sizes])
    lines = [PricedLine.through(sizes, slowest[2 * i : 2 * i + 2]) for i, (_, sizes) in enumerate(timed)]
    return MeasuredLink(lines[0], lines[1], size, *lines[2:])


def agreed(communicator: Communicator, seconds: Sequence[float]) -> list[float]:
    """Return the largest of each of ``seconds`` over all ranks. Collective."""
    tensor = torch.tensor(seconds, dtype=torch.float64)
    communicator.all_reduce(tensor, "max")
    slowest: list[float] = tensor.tolist()
    return slowest


def _time(communicator: Communicator, x: torch.Tensor, out: torch.Tensor, kind: str) -> float:
    communicator.barrier()
    start = time.perf_counter()
    if kind == "all_gather":
        communicator.all_gather(out, x)
    elif kind == "reduce_on_host":
        parts = torch.tensor_split(x, len(communicator.hosts[0]))
        communicator.channel.run("reduce_on_host", False, parts)
    else:
        communicator.all_reduce(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
