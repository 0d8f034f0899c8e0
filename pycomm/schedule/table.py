"""Schedules: collectives as tables of edges.

A schedule moves an array that is cut into ``num_chunks`` chunks among ``num_ranks`` ranks. It is a
sequence of *rounds*, a round is a set of *edges*, an edge is one message: ``count`` consecutive
chunks from ``src`` to ``dst``, which overwrites its own by them (COPY) or adds them to its own
(REDUCE). All edges of a round read the state at the round's start. Every rank starts with its own
contribution in every chunk.

Rounds are generated, as columns of integers, whenever somebody wants to see them: a ring over 4096
ranks has 33 million edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

COPY = 0
REDUCE = 1

GOALS = ("all_reduce", "reduce_scatter", "all_gather")


class Round(NamedTuple):
    """Edges that read the same state; columns of equal length."""

    src: Ints
    dst: Ints
    chunk: Ints
    count: Ints  # type: ignore[assignment]  # not tuple's method of that name
    op: Ints

    @classmethod
    def of(cls, src: Any, dst: Any, chunk: Any, count: Any, op: Any) -> Round:
        """From columns, or numbers that all edges share."""
        columns = [np.asarray(column, np.int64) for column in (src, dst, chunk, count, op)]
        length = max(column.size for column in columns if column.ndim) if any(c.ndim for c in columns) else 1
        return cls(*(column if column.ndim else np.full(length, column) for column in columns))

    @property
    def num_edges(self) -> int:
        return len(self.src)

    def edges(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Row by row, as Python's integers."""
        return zip(*(column.tolist() for column in self), strict=True)


class Table(Protocol):
    """What can be verified, priced and run: a :class:`Schedule`, or anything like it."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    def rounds(self) -> Iterable[Round]: ...


@dataclass(frozen=True)
class Stats:
    """What a schedule costs, whatever the network. Bytes are multiples of the array's ``n``.

    Attributes:
        steps: rounds.
        messages: the most that one rank sends.
        total: bytes sent by all ranks together.
        max_sent: the most bytes that one rank sends. max_received: likewise.
        critical: bytes on the critical path: the time it takes where a byte takes one second and
            nothing else takes time. Every rank has one sending and one receiving port, edges take
            them in the order of the table, and start once their chunks are final at the sender.
    """

    steps: int
    messages: int
    total: float
    max_sent: float
    max_received: float
    critical: float

    def __getitem__(self, name: str) -> float:
        value: float = getattr(self, name)
        return value


@dataclass(frozen=True, eq=False)
class Schedule:
    """A collective of ``num_ranks`` ranks on ``num_chunks`` chunks of equal size (to within one element).

    Attributes:
        name: the algorithm's, with what else was chosen: "ring", "torus(4,2)".
        generate: makes the rounds, in order.
        goal: "all_reduce": every rank ends with every contribution in every chunk.
            "reduce_scatter": rank ``owners[c]`` ends with every contribution in chunk c.
            "all_gather": every rank ends with what rank ``owners[c]`` started with in chunk c.
        owners: by chunk; ``None`` for all_reduce. A reduction to one rank is a reduce_scatter, and
            a broadcast an all_gather, of chunks that one rank owns.
        turns: whether the table stays the same, in the same order at every port, when all ranks and
            all chunks, of which there are as many, one by one, move on by one place. Saves time in
            :func:`pycomm.schedule.simulate`.
    """

    name: str
    num_ranks: int
    num_chunks: int
    generate: Callable[[], Iterator[Round]]
    goal: str = "all_reduce"
    owners: Ints | None = None
    turns: bool = False

    def rounds(self) -> Iterator[Round]:
        """The table, from its first round."""
        return self.generate()

    def stats(self) -> Stats:
        """See :class:`Stats`; computed once."""
        return self._stats

    @cached_property
    def _stats(self) -> Stats:
        from pycomm.schedule.simulate import stats_of  # which needs this module

        return stats_of(self)

    def __repr__(self) -> str:
        return f"<schedule {self.name}: {self.goal} among {self.num_ranks} ranks, {self.num_chunks} chunks>"


def require_ranks(num_ranks: int, name: str = "num_ranks") -> int:
    """``num_ranks`` as Python's integer; ValueError unless it is a number of ranks."""
    if not isinstance(num_ranks, int | np.integer) or isinstance(num_ranks, bool) or num_ranks < 1:
        raise ValueError(f"{name} is {num_ranks!r}, wanted a whole number of at least 1")
    return int(num_ranks)


def every_rank_owns_one(num_ranks: int) -> Ints:
    """``owners`` where rank r owns chunk r."""
    return np.arange(num_ranks, dtype=np.int64)


def together(*sequences: Iterable[Round]) -> Iterator[Round]:
    """The first rounds of all sequences as one round, then the second ones, and so on."""
    for rounds in zip_longest(*sequences):
        present = [r for r in rounds if r is not None and r.num_edges > 0]
        if present:
            yield concatenate(present)


def concatenate(rounds: Sequence[Round]) -> Round:
    """One round of all edges, in order."""
    if len(rounds) == 1:
        return rounds[0]
    return Round(*(np.concatenate(columns) for columns in zip(*rounds, strict=True)))


def delayed(rounds: Iterable[Round], by: int) -> Iterator[Round]:
    """``by`` empty rounds go ahead; for :func:`together`, which drops what is empty."""
    nothing = np.empty(0, np.int64)
    for _ in range(by):
        yield Round(nothing, nothing, nothing, nothing, nothing)
    yield from rounds


def embed(rounds: Iterable[Round], ranks: Any, first_chunk: Any, scale: int) -> Iterator[Round]:
    """The same rounds in several groups of a larger schedule at once.

    Args:
        ranks: [groups, ranks of the smaller schedule], who plays whom.
        first_chunk: per group, where its chunk 0 begins.
        scale: chunks of the larger schedule that are one of the smaller.
    """
    players = np.asarray(ranks, np.int64)
    begin = np.broadcast_to(np.asarray(first_chunk, np.int64), len(players))[:, None]
    for r in rounds:
        yield Round.of(
            players[:, r.src].ravel(),
            players[:, r.dst].ravel(),
            (begin + r.chunk * scale).ravel(),
            np.tile(r.count * scale, len(players)),
            np.tile(r.op, len(players)),
        )
