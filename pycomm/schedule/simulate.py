"""Simulation: the time that a schedule takes on a described network.

The model. Each rank has one sending and one receiving port, and both work at once. A message of b bytes
over a link (alpha, beta, gamma) occupies the sender's port for alpha + beta b seconds. It occupies the
receiver's port from the same moment, for as long, and for another gamma b if it is reduced. It begins
once both ports are free and its chunks are final at the sender, that is, once every message of an
earlier round into those chunks has been received. Ports serve messages in the order of the table. There
are no barriers between rounds.

With segments of s bytes, a message costs alpha for each segment. If all its chunks came in one earlier
message, starting at the same chunk, it begins when that message's first segment has arrived, and ends at
least one segment after it.

All times have an axis of sizes, so a curve over many sizes takes one pass over the table. What a message
waits for does not depend on sizes: the previous message on either port, and the last message that wrote
its chunks. A first pass over the table finds the latter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pycomm.schedule.network import Network, load
from pycomm.schedule.table import REDUCE, Ints, Round, Table, expand

Floats = npt.NDArray[np.float64]


def simulate(
    schedule: Table,
    nbytes: Any,
    network: Network | str | os.PathLike[str] | None = None,
    segment_bytes: float | None = None,
) -> Any:
    """Simulate how many seconds ``schedule`` takes for an array of ``nbytes`` bytes on ``network``.

    Args:
        nbytes: a number, or an array of sizes that are priced together.
        network: a network, the name of one in ``NETWORKS``, a file, or the default one if ``None``.
        segment_bytes: size of the segments that messages are cut into; ``None``: they are not.

    Returns:
        A float for a number, an array of float64 of the same shape for an array.

    Raises:
        ValueError: a negative size, or a network that :func:`load` refuses.
    """
    sizes = np.atleast_1d(np.asarray(nbytes, np.float64))
    if not (np.isfinite(sizes) & (sizes >= 0)).all():
        raise ValueError(f"nbytes is {nbytes!r}, wanted sizes that are not negative")
    if segment_bytes is not None and not segment_bytes > 0:
        raise ValueError(f"segment_bytes is {segment_bytes!r}, wanted a positive number, or None")
    if segment_bytes == np.inf:
        segment_bytes = None
    times = _Clock(schedule, sizes.ravel(), load(network), segment_bytes).run().reshape(sizes.shape)
    return float(times[0]) if np.ndim(nbytes) == 0 else times


class _Part:
    """Part of the table to simulate: all edges or, if table and hosts are symmetric, those that one host sends.

    In a symmetric table the same happens on every host, with all chunks shifted, so the ranks of one host stand
    for all; ``num_ranks`` is then their number.
    """

    def __init__(self, schedule: Table, network: Network, segmented: bool) -> None:
        self._schedule = schedule
        self.num_chunks = schedule.num_chunks
        self.num_ranks = schedule.num_ranks
        hosts = network.per_host if network.per_host is not None and network.per_host < schedule.num_ranks else 1
        if getattr(schedule, "turns", False) and schedule.num_ranks % hosts == 0 and not segmented:
            self.num_ranks = hosts
        self._whole = self.num_ranks == schedule.num_ranks

    def rounds(self) -> Iterator[Round]:
        for r in self._schedule.rounds():
            if self._whole:
                yield r
            else:
                kept = r.src < self.num_ranks
                yield Round(*(column[kept] for column in r))

    def home(self, rank: Ints) -> Ints:
        """Return the simulated rank that stands for ``rank``."""
        return rank if self._whole else rank % self.num_ranks

    def moves(self, r: Round) -> tuple[Ints, Ints, Ints]:
        """Expand the edges as :func:`expand` does."""
        if self._whole:
            return expand(r, self.num_chunks)
        home = self.home(r.dst)
        turned = (r.chunk - (r.dst - home)) % self.num_chunks
        return np.arange(r.num_edges), r.src * self.num_chunks + r.chunk, home * self.num_chunks + turned


@dataclass
class _Waits:
    """Dependencies of the edges of one round.

    Attributes:
        writer: for each edge, the last edge that wrote what it sends, -1 for none.
        forwards: for each edge, whether its writer wrote all of that, from the same chunk on; ``None``
            without segments.
        memory: for each edge, where the time of its end is kept, -1 if no edge needs it.
        oldest: the first place in memory that this round and later ones still need.
    """

    writer: npt.NDArray[np.int32]
    forwards: npt.NDArray[np.bool_] | None
    memory: npt.NDArray[np.int32]
    oldest: int = 0


def _waits(part: _Part, segmented: bool) -> list[_Waits]:
    """Return the dependencies of each round.

    Edges are numbered through the whole table at first; at the end, only those that others wait for.
    """
    num_chunks = part.num_chunks
    last = np.full(part.num_ranks * num_chunks, -1, np.int32)
    # The first chunk of the last edge that wrote a place, and how many it had.
    begins, counts = (np.full(len(last) if segmented else 0, -1, np.int32) for _ in range(2))
    waits, base = [], 0
    for r in part.rounds():
        edge, read, written = part.moves(r)
        # Among the writers of one rank the one with the highest number is received last.
        writer = (
            last[read] if len(edge) == r.num_edges else np.maximum.reduceat(last[read], np.cumsum(r.count) - r.count)
        )
        forwards = None
        if segmented:
            first = r.src * num_chunks + r.chunk
            forwards = (begins[first] == r.chunk) & (counts[first] >= r.count) & (last[first] == writer) & (writer >= 0)
            begins[written], counts[written] = r.chunk[edge], r.count[edge]
        waits.append(_Waits(writer, forwards, np.arange(base, base + r.num_edges, dtype=np.int32)))
        last[written] = base + edge
        base += r.num_edges
    awaited = np.zeros(base + 1, bool)  # the last element is what index -1 reads
    for wait in waits:
        awaited[wait.writer] = True
    awaited[-1] = False
    memory = np.where(awaited, np.cumsum(awaited, dtype=np.int32) - 1, np.int32(-1))
    oldest = int(awaited.sum())
    for wait in reversed(waits):
        wait.writer, wait.memory = memory[wait.writer], memory[wait.memory]
        if (wait.writer >= 0).any():
            oldest = min(oldest, int(wait.writer[wait.writer >= 0].min()))
        wait.oldest = oldest
    return waits


class _Clock:
    """Clock that runs the table and keeps the time of every port."""

    def __init__(self, schedule: Table, sizes: Floats, network: Network, segment_bytes: float | None) -> None:
        self._part = _Part(schedule, network, segment_bytes is not None)
        self._chunk_bytes = sizes / schedule.num_chunks
        self._network = network
        self._costs = network.costs()
        self._segment_bytes = segment_bytes
        shape = (self._part.num_ranks, len(sizes))
        self._sending, self._receiving = np.zeros(shape), np.zeros(shape)  # when each port is free again
        self._first = np.zeros((0, len(sizes)))  # when the first segment of each edge in memory was there
        self._last = np.zeros((0, len(sizes)))  # and the last one
        self._memory_from = 0

    def run(self) -> Floats:
        waits = _waits(self._part, self._segment_bytes is not None)
        for r, wait in zip(self._part.rounds(), waits, strict=True):
            self._make_room(wait)
            for wave in _waves(r.src, self._part.home(r.dst)):
                self._move(r, wave, wait)
        ends = np.concatenate([self._sending, self._receiving])
        return np.asarray(ends.max(0)) + self._network.overhead

    def _make_room(self, wait: _Waits) -> None:
        """Forget times that no later edge needs, and make room for this round's."""
        gone = min(wait.oldest - self._memory_from, len(self._last))
        room = np.zeros((np.count_nonzero(wait.memory >= 0), len(self._chunk_bytes)))
        self._last = np.concatenate([self._last[gone:], room])
        if self._segment_bytes is not None:
            self._first = np.concatenate([self._first[gone:], room])
        self._memory_from += gone

    def _move(self, r: Round, wave: Ints | slice, wait: _Waits) -> None:
        """Move the edges of ``wave``, of which no two share a port."""
        src, dst, writer = r.src[wave], self._part.home(r.dst[wave]), wait.writer[wave]
        start = np.maximum(self._sending.take(src, 0), self._receiving.take(dst, 0))
        depends = np.flatnonzero(writer >= 0)
        memory = writer[depends] - self._memory_from
        awaited = np.flatnonzero(wait.memory[wave] >= 0)
        kept = wait.memory[wave][awaited] - self._memory_from
        if wait.forwards is None:
            if len(depends) == len(writer):
                np.maximum(start, self._last.take(memory, 0), out=start)
            elif len(depends):
                start[depends] = np.maximum(start[depends], self._last[memory])
            travel, add = self._durations(r, wave)
            sent = start + travel
            received = sent + add
        else:
            forwards = wait.forwards[wave][depends, None]
            ready = np.where(forwards, self._first[memory], self._last[memory])
            start[depends] = np.maximum(start[depends], ready)
            sent, received, first = self._in_segments(r, wave, start, depends, memory)
            self._first[kept] = first[awaited]
        self._last[kept] = received if len(kept) == len(received) else received[awaited]
        self._sending[src] = sent
        self._receiving[dst] = received

    def _durations(self, r: Round, wave: Ints | slice) -> tuple[Floats, Floats]:
        """Return how long each message holds the sender's port, and how much longer the receiver's."""
        link, count, op = self._network.links(r.src[wave], r.dst[wave]), r.count[wave], r.op[wave]
        alpha, beta, gamma = (self._costs[key][:, None] for key in ("alpha", "beta", "gamma"))
        if count.min() == count.max() and op.min() == op.max():  # then a row per class of link is enough
            num_bytes = count[0] * self._chunk_bytes
            travel, add = alpha + beta * num_bytes, (gamma if op[0] == REDUCE else 0 * gamma) * num_bytes
            return (travel.take(link, 0), add.take(link, 0)) if link.any() else (travel[:1], add[:1])
        num_bytes = count[:, None] * self._chunk_bytes
        gamma = np.where(op[:, None] == REDUCE, gamma[link], 0.0)
        return alpha[link] + beta[link] * num_bytes, gamma * num_bytes

    def _in_segments(
        self, r: Round, wave: Ints | slice, start: Floats, depends: Ints, memory: npt.NDArray[np.int32]
    ) -> tuple[Floats, Floats, Floats]:
        """Return when the messages that begin at ``start`` are sent and received, and their first segments received."""
        assert self._segment_bytes is not None
        link = self._network.links(r.src[wave], r.dst[wave])
        alpha, beta, gamma = (self._costs[key][link][:, None] for key in ("alpha", "beta", "gamma"))
        gamma = np.where(r.op[wave][:, None] == REDUCE, gamma, 0.0)
        num_bytes = r.count[wave][:, None] * self._chunk_bytes
        segments = np.maximum(np.ceil(num_bytes / self._segment_bytes), 1)
        first = np.minimum(num_bytes, self._segment_bytes)
        final = num_bytes - (segments - 1) * self._segment_bytes
        sent = start + (segments * alpha + beta * num_bytes)
        sent[depends] = np.maximum(sent[depends], self._last[memory] + (alpha + beta * final)[depends])
        # Segments are added while later ones travel; the slower of the two decides.
        received = np.maximum(sent + gamma * final, start + alpha + beta * first + gamma * num_bytes)
        return sent, received, start + alpha + (beta + gamma) * first


def _waves(src: Ints, dst: Ints) -> Iterator[Ints | slice]:
    """Split the edges of a round into waves in which no two share a port; ports keep the table's order."""
    if len(src) == 0:
        return
    if np.bincount(src).max() == 1 and np.bincount(dst).max() == 1:
        yield slice(None)
        return
    (before_src, nth_src), (before_dst, nth_dst) = _earlier(src), _earlier(dst)
    # An edge's wave is one more than the later of the edges before it at its two ports. The first guess, the number
    # of edges before it, is already right for tables that go by shifts.
    wave = np.append(np.maximum(nth_src, nth_dst), -1)  # the last element is what index -1 reads
    settled = False
    while not settled:
        better = np.maximum(wave[before_src], wave[before_dst]) + 1
        settled = np.array_equal(better, wave[:-1])
        wave[:-1] = better
    order = np.argsort(wave[:-1], kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(wave[order])) + 1)


def _earlier(port: Ints) -> tuple[Ints, Ints]:
    """Return, for each edge, the last one before it at the same port, -1 for none, and how many came before."""
    small = port.astype(np.uint16) if port.max() < 1 << 16 else port  # which numpy sorts in linear time
    order = np.argsort(small, kind="stable")
    same = np.append(False, small[order][1:] == small[order][:-1])
    previous = np.full(len(port), -1, np.int64)
    previous[order[same]] = order[np.flatnonzero(same) - 1]
    starts = np.flatnonzero(~same)
    nth = np.empty(len(port), np.int64)
    nth[order] = np.arange(len(port)) - np.repeat(starts, np.diff(starts, append=len(port)))
    return previous, nth
