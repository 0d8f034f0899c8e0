"""Tables of edges: what collectives are made of.

A table moves an array that is cut into ``num_chunks`` chunks among ``num_ranks`` ranks. It is a
sequence of *rounds*, a round is a set of *edges*, an edge is one message: ``count`` consecutive
chunks from ``src`` to ``dst``, which overwrites its own with them (COPY) or adds them to its own
(REDUCE). All edges of a round read the state at the round's start. Every rank starts with its own
contribution in every chunk.

Rounds are generated, as columns of integers, whenever they are asked for: a ring over 4096 ranks has
33 million edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

COPY = 0
REDUCE = 1

GOALS = ("all_reduce", "reduce_scatter", "all_gather", "mixing")


class Round(NamedTuple):
    """Edges that read the same state, as columns of equal length."""

    src: Ints
    dst: Ints
    chunk: Ints
    count: Ints  # type: ignore[assignment]  # not tuple's method of that name
    op: Ints

    @classmethod
    def of(cls, src: Any, dst: Any, chunk: Any, count: Any, op: Any) -> Round:
        """Make a round of columns, or of numbers that all edges share."""
        columns = [np.asarray(column, np.int64) for column in (src, dst, chunk, count, op)]
        length = max(column.size for column in columns if column.ndim) if any(c.ndim for c in columns) else 1
        return cls(*(column if column.ndim else np.full(length, column) for column in columns))

    @property
    def num_edges(self) -> int:
        return len(self.src)

    def edges(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Iterate over the edges, as Python's integers."""
        return zip(*(column.tolist() for column in self), strict=True)


class Table(Protocol):
    """Table that can be verified, priced and run: a :class:`pycomm.schedule.Schedule`, or anything like it."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def num_chunks(self) -> int: ...
    def rounds(self) -> Iterable[Round]: ...


def require_ranks(num_ranks: int, name: str = "num_ranks") -> int:
    """Return ``num_ranks`` as an int; raise ValueError unless it is a number of ranks."""
    if not isinstance(num_ranks, int | np.integer) or isinstance(num_ranks, bool) or num_ranks < 1:
        raise ValueError(f"{name} is {num_ranks!r}, wanted a whole number of at least 1")
    return int(num_ranks)


def together(*sequences: Iterable[Round]) -> Iterator[Round]:
    """Merge the first rounds of all sequences into one round, then the second ones, and so on."""
    for rounds in zip_longest(*sequences):
        present = [r for r in rounds if r is not None and r.num_edges > 0]
        if present:
            yield concatenate(present)


def concatenate(rounds: Sequence[Round]) -> Round:
    """Return one round of all edges, in order."""
    if len(rounds) == 1:
        return rounds[0]
    return Round(*(np.concatenate(columns) for columns in zip(*rounds, strict=True)))


def delayed(rounds: Iterable[Round], by: int) -> Iterator[Round]:
    """Put ``by`` empty rounds in front, for :func:`together`, which drops empty ones."""
    nothing = np.empty(0, np.int64)
    for _ in range(by):
        yield Round(nothing, nothing, nothing, nothing, nothing)
    yield from rounds


def embed(rounds: Iterable[Round], ranks: Any, first_chunk: Any, scale: int) -> Iterator[Round]:
    """Run the same rounds in several groups of a larger schedule at once.

    Args:
        ranks: [groups, ranks of the smaller schedule]: the rank of the larger schedule for each.
        first_chunk: for each group, the chunk of the larger schedule where its chunk 0 begins.
        scale: how many chunks of the larger schedule make one of the smaller.
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


def expand(r: Round, num_chunks: int) -> tuple[Ints, Ints, Ints]:
    """Return, for every chunk that moves, its edge and the places it is read from and written to.

    A place is rank * num_chunks + chunk.
    """
    if r.num_edges and int(r.count.max()) == 1:
        edge, chunk = np.arange(r.num_edges), r.chunk
    else:
        edge = np.repeat(np.arange(r.num_edges), r.count)
        first = np.cumsum(r.count) - r.count
        chunk = r.chunk[edge] + np.arange(len(edge)) - first[edge]
    return edge, r.src[edge] * num_chunks + chunk, r.dst[edge] * num_chunks + chunk
