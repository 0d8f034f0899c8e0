"""Calibration: measures the network of a group for :mod:`pycomm.schedule`.

Messages are timed as they occur in a collective: pairs of ranks exchange arrays by programs that the usual executor
runs, all pairs of a class at once and in both directions. Then the algorithms themselves are timed at a few sizes,
because a model with three parameters ignores caches and ranks that outnumber cores. For the same number of ranks,
these times decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from pycomm import schedule
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.algorithms import ranks_per_host
from pycomm.collectives.transport.rendezvous import host_identity
from pycomm.schedule.collective import Schedule
from pycomm.schedule.network import Link, Network
from pycomm.schedule.program import Program, program_of
from pycomm.schedule.table import COPY, REDUCE, Round

SIZES = tuple(4**i for i in range(5, 13))
"""Default sizes, in bytes, at which algorithms are measured: 1 KiB to 16 MiB."""

_MESSAGES = tuple(4**i for i in range(4, 12))  # bytes of a message: 256 B to 4 MiB
_EXCHANGES = 16  # in one program, so that the overhead of a collective is a small part
_ROUNDS = 7  # the fewest rounds of measurements; medians are taken
_MOST_ROUNDS = 31
_ENOUGH_SECONDS = 1.5  # after which there are no more rounds than the fewest
_BLOCK_SECONDS = 2e-3  # calls that take less are timed several at a time
_LARGEST_BLOCK = 20
_PROMISING = 4.0  # algorithms within this factor of the best simulated time are measured

Tell = Callable[[str], None]
Call = Callable[[torch.Tensor], object]
Case = tuple[Call, int]
"""Function to be timed, and the size of its array in bytes."""


def calibrate(communicator: Communicator, sizes: Sequence[int] = SIZES, tell: Tell = lambda line: None) -> Network:
    """Measure the network of ``communicator``'s group. Collective; takes seconds; returns the same on all ranks.

    Args:
        sizes: sizes in bytes at which algorithms are measured.
        tell: called with lines that report progress.
    """
    if communicator.size == 1:
        raise ValueError("the group has one rank, wanted at least two: there is nothing to measure")
    per_host = _ranks_per_host(communicator)
    nothing = _exchange(communicator, 1, per_host, 0)
    (overhead,) = _measure(communicator, [(_runs(communicator, nothing), 4)])
    links = []
    if per_host > 1:
        tell("messages within a host")
        links.append(_link(communicator, 1, per_host, overhead))
    if per_host < communicator.size:
        tell("messages between hosts")
        links.append(_link(communicator, per_host, per_host, overhead))
    network = Network(
        name=f"calibrated: {communicator.size} ranks, {per_host} per host, {communicator.transport}",
        per_host=per_host,
        within_host=links[0],
        between_hosts=links[-1],
        overhead=overhead,
        transport=communicator.transport,
    )
    measured = _curves(communicator, network, sizes, tell)
    # All ranks use what rank 0 found.
    found = replace(network, measured=measured, measured_ranks=communicator.size).to_json().encode()
    return Network.from_json(communicator.channel.all_gather_bytes(found)[0].decode())


def _ranks_per_host(communicator: Communicator) -> int:
    hosts = [data.decode() for data in communicator.channel.all_gather_bytes(host_identity().encode())]
    per_host = ranks_per_host(hosts)
    if per_host is None:
        counts = [hosts.count(host) for host in dict.fromkeys(hosts)]
        raise ValueError(f"the hosts have {counts} ranks, wanted equally many on each, with consecutive numbers")
    return per_host


def _exchange(communicator: Communicator, distance: int, per_host: int, rounds: int, op: int = COPY) -> Program:
    """Return a program in which pairs of ranks ``distance`` apart exchange two chunks, one in each direction."""
    rank = np.arange(communicator.size)
    unit = rank // distance
    # Neighbors on one host, or equal local ranks on neighboring hosts; unpaired ranks do nothing.
    near = rank[(unit % 2 == 0) & (rank + distance < communicator.size)]
    if distance < per_host:
        near = near[(near % per_host) % 2 == 0]
        near = near[near // per_host == (near + distance) // per_host]
    far = near + distance

    def generate() -> Iterator[Round]:
        for number in range(rounds):
            there, back = (near, far) if number % 2 == 0 else (far, near)
            chunk = np.repeat([0, 1], len(near))
            yield Round.of(np.concatenate([there, back]), np.concatenate([back, there]), chunk, 1, op)

    # Not verified, as it is not a collective.
    return program_of(Schedule("exchange", communicator.size, 2, generate), communicator.rank)


def _measure(communicator: Communicator, cases: Sequence[Case]) -> list[float]:
    """Return the seconds of one call of each case, on the slowest rank: medians over rounds of all cases."""
    blocks = [1] * len(cases)
    taken: list[list[float]] = [[] for _ in cases]
    spent, number = 0.0, 0
    # All ranks have the same figures, so all stop at the same round.
    while number <= _ROUNDS or (number <= _MOST_ROUNDS and spent < _ENOUGH_SECONDS):
        for i, (call, num_bytes) in enumerate(cases):
            seconds = _slowest(communicator, call, num_bytes, blocks[i])
            spent += seconds * blocks[i]
            if number == 0:  # a warm-up, which determines how many calls to time together
                blocks[i] = int(min(_LARGEST_BLOCK, max(1, _BLOCK_SECONDS / max(seconds, 1e-9))))
            else:
                taken[i].append(seconds)
        number += 1
    return [float(np.median(seconds)) for seconds in taken]


def _slowest(communicator: Communicator, call: Call, num_bytes: int, calls: int) -> float:
    x = communicator.empty(max(1, num_bytes // 4)).fill_(1.0)
    communicator.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call(x)
    slowest = torch.tensor([(time.perf_counter() - start) / calls], dtype=torch.float64)
    communicator.all_reduce(slowest, "max", algorithm="native")
    return slowest.item()


def _link(communicator: Communicator, distance: int, per_host: int, overhead: float) -> Link:
    """Measure a class of links: alpha and beta by exchanges of several sizes, gamma by reducing as well."""
    copy, reduce = (_exchange(communicator, distance, per_host, _EXCHANGES, op) for op in (COPY, REDUCE))
    # Two messages, of a chunk each, are in flight at a time.
    cases = [(_runs(communicator, copy), 2 * num_bytes) for num_bytes in _MESSAGES]
    cases.append((_runs(communicator, reduce), 2 * _MESSAGES[-1]))
    *times, reducing = ((np.array(_measure(communicator, cases)) - overhead).clip(0) / _EXCHANGES).tolist()
    alpha, beta = _line(_MESSAGES, times)
    gamma = (reducing - times[-1]) / _MESSAGES[-1]
    return Link(alpha=max(0.0, alpha), beta=max(0.0, beta), gamma=max(0.0, gamma))


def _line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    """Fit time against size by a line through the last point; return its intercept and slope, neither negative.

    The line passes through the last point because the largest message has the least relative noise, and predicts large
    arrays. It minimizes the sum of absolute log ratios: relative errors, so that small messages count equally, and not
    squared, so that a few outliers (overlap with the sender's next message, a rank that waited for a core) do not
    bend it.
    """
    x, y = np.array(sizes, np.float64), np.maximum(times, 1e-9)
    # The best line passes through a second point or the origin.
    alphas = np.append(((y * x[-1] - y[-1] * x)[:-1] / (x[-1] - x[:-1])).clip(0, y[-1]), 0.0)
    betas = (y[-1] - alphas) / x[-1]
    off = np.abs(np.log((alphas[:, None] + betas[:, None] * x) / y)).sum(1)
    best = int(off.argmin())
    return float(alphas[best]), float(betas[best])


def _curves(
    communicator: Communicator, network: Network, sizes: Sequence[int], tell: Tell
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Time the transport's own algorithm, and the promising ones, at ``sizes``."""
    wanted = sorted(set(sizes))
    names = ["native", *_promising_algorithms(communicator, network, wanted)]
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for size in wanted:
        tell(f"{len(names)} algorithms at {size} bytes")
        times = _measure(communicator, [(partial(communicator.all_reduce, algorithm=name), size) for name in names])
        for name, seconds in zip(names, times, strict=True):
            curves[name].append((float(size), seconds))
    return {name: tuple(curve) for name, curve in curves.items()}


def _runs(communicator: Communicator, program: Program) -> Call:
    return lambda x: communicator.channel.run_program(program, x)


def _promising_algorithms(communicator: Communicator, network: Network, sizes: Sequence[float]) -> list[str]:
    """Return the algorithms that simulation does not rule out; rank 0's choice on all ranks."""
    ranking = schedule.rank_algorithms(communicator.size, network, sizes)
    names = []
    for name in ranking.curves:
        times = [(ranking.seconds(name, size), ranking.at(size)[0][1]) for size in sizes]
        if any(seconds <= _PROMISING * best for seconds, best in times):
            names.append(name)
    return communicator.channel.all_gather_bytes("\n".join(names).encode())[0].decode().split("\n")
