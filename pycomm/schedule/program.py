"""Program: one rank's part of a schedule, its sends and receives in the order of the table, and their dependencies.

Sender and receiver project the same edge, so a send without its receive cannot be expressed. The columns
of a program are named below; csrc/transport/program.h explains each. Between GPUs the first of them suffice.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np

from pycomm.schedule.table import REDUCE, Ints, Round, Table

SEND_COLUMNS = ("peer", "chunk", "count", "conflict", "fresh", "after_received", "after_taken")
RECEIVE_COLUMNS = ("peer", "chunk", "count", "reduces", "from_shadow", "after_taken", "after_sent")

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Program:
    """Program of one rank.

    Attributes:
        sends, receives: rows of ``SEND_COLUMNS`` / ``RECEIVE_COLUMNS``.
        send_rounds, receive_rounds: the round of each row, increasing.
        digest: digest of the whole table, the same on all ranks.
        at_once: whether every chunk is reduced from all ranks' in one round, by one rank.
    """

    name: str
    rank: int
    num_ranks: int
    num_chunks: int
    sends: Ints
    receives: Ints
    send_rounds: Ints
    receive_rounds: Ints
    digest: int
    at_once: bool = False

    def words(self) -> Ints:
        """Return the whole program as the one array that the extension takes."""
        header = [self.num_chunks, len(self.sends), len(self.receives)]
        return np.concatenate([header, self.sends.ravel(), self.receives.ravel()]).astype(np.int64)

    def border(self, chunk: int, num_elements: int) -> int:
        """Return where ``chunk`` of an array of ``num_elements`` begins."""
        return num_elements * chunk // self.num_chunks

    def rounds(self) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
        """Iterate over the rounds in which this rank has any messages: its sends and its receives."""
        rows: list[dict[int, list[list[int]]]] = []
        for numbers, table in ((self.send_rounds, self.sends), (self.receive_rounds, self.receives)):
            numbered = zip(numbers.tolist(), table.tolist(), strict=True)
            rows.append(
                {number: [row for _, row in group] for number, group in groupby(numbered, key=lambda pair: pair[0])}
            )
        for number in sorted({*rows[0], *rows[1]}):
            yield rows[0].get(number, []), rows[1].get(number, [])


def sums_of(rank: int, receives: list[list[int]], owns: Sequence[T], incoming: Sequence[T]) -> list[list[T]]:
    """Return, for each chunk that a round reduces, where the result goes, and what it is reduced from.

    All that comes for a chunk is reduced at once, so that sums of half types are rounded once. It is in the order of
    the ranks: partners that exchange sums get the same bits, also of zeros and NaNs.
    """
    terms: dict[tuple[int, int], list[tuple[int, T]]] = {}
    for row, own, theirs in zip(receives, owns, incoming, strict=True):
        if row[3]:
            terms.setdefault((row[1], row[2]), [(rank, own)]).append((row[0], theirs))
    by_rank = operator.itemgetter(0)
    return [[each[0][1], *(x for _, x in sorted(each, key=by_rank))] for each in terms.values()]


def program_of(schedule: Table, rank: int) -> Program:
    """Project ``schedule``, which must be verified (:func:`pycomm.schedule.verify`), on ``rank``."""
    num_ranks, num_chunks = int(schedule.num_ranks), int(schedule.num_chunks)
    build = _Builder(rank, num_chunks)
    digest = hashlib.blake2b(digest_size=8)
    digest.update(np.array([num_ranks, num_chunks], np.int64).tobytes())
    reduced = np.zeros(num_chunks, np.int64)
    at_once = True
    for number, r in enumerate(schedule.rounds()):
        r = Round(*(np.ascontiguousarray(column, np.int64) for column in r))
        digest.update(np.array([r.num_edges]).tobytes())
        for column in r:
            digest.update(column.tobytes())
        build.add(number, r)
        at_once = at_once and _reduces_at_once(r, num_ranks, reduced)
    return Program(
        name=str(getattr(schedule, "name", type(schedule).__name__)),
        rank=rank,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        sends=_rows(build.sends, len(SEND_COLUMNS)),
        receives=_rows(build.receives, len(RECEIVE_COLUMNS)),
        send_rounds=np.array(build.send_rounds, np.int64),
        receive_rounds=np.array(build.receive_rounds, np.int64),
        digest=int.from_bytes(digest.digest(), "little"),
        at_once=at_once and bool((reduced == num_ranks - 1).all()),
    )


def _reduces_at_once(r: Round, num_ranks: int, reduced: Ints) -> bool:
    """Return whether each chunk that ``r`` reduces comes to one rank from all others; count what comes of each."""
    is_reduced = r.op == REDUCE
    chunk, dst = r.chunk[is_reduced], r.dst[is_reduced]
    if not (r.count[is_reduced] == 1).all():
        return False
    np.add.at(reduced, chunk, 1)
    _, counts = np.unique(dst * len(reduced) + chunk, return_counts=True)
    return bool((counts == num_ranks - 1).all())


def _rows(rows: list[list[int]], width: int) -> Ints:
    return np.array(rows, np.int64).reshape(-1, width)


class _Builder:
    """Builder of a program, round by round; keeps for each chunk of this rank the last message that touched it."""

    def __init__(self, rank: int, num_chunks: int) -> None:
        self._rank = rank
        # One more than the number of the last message; 0: none.
        self._received = np.zeros(num_chunks, np.int64)
        self._sent = np.zeros(num_chunks, np.int64)
        self._sent_in_place = np.zeros(num_chunks, np.int64)
        self._sent_in_conflict = np.zeros(num_chunks, np.int64)
        self.sends: list[list[int]] = []
        self.receives: list[list[int]] = []
        self.send_rounds: list[int] = []
        self.receive_rounds: list[int] = []

    def add(self, number: int, r: Round) -> None:
        outgoing, incoming = np.flatnonzero(r.src == self._rank), np.flatnonzero(r.dst == self._rank)
        in_place_before = self._sent_in_place.copy()
        self._add_sends(number, r, outgoing, _written_by(r, self._rank, len(self._sent)))
        self._add_receives(number, r, incoming, in_place_before)
        for at, edge in enumerate(incoming.tolist(), start=len(self.receives) - len(incoming) + 1):
            self._received[r.chunk[edge] : r.chunk[edge] + r.count[edge]] = at

    def _add_sends(self, number: int, r: Round, outgoing: Ints, changing: Ints) -> None:
        earlier = self._sent.copy()
        first = len(self.sends)
        for edge in outgoing.tolist():
            chunk, count = int(r.chunk[edge]), int(r.count[edge])
            chunks = slice(chunk, chunk + count)
            conflict = bool(changing[chunks].any())
            # Chunks already sent to others in this round need not be copied to the shadow again.
            fresh = not ((self._sent_in_conflict if conflict else self._sent)[chunks] > first).all()
            row = [int(r.dst[edge]), chunk, count, int(conflict), int(fresh)]
            self.sends.append([*row, int(self._received[chunks].max()), int(earlier[chunks].max())])
            self.send_rounds.append(number)
            self._sent[chunks] = len(self.sends)
            (self._sent_in_conflict if conflict else self._sent_in_place)[chunks] = len(self.sends)

    def _add_receives(self, number: int, r: Round, incoming: Ints, in_place_before: Ints) -> None:
        changing: dict[int, Ints] = {}
        for edge in incoming.tolist():
            src = int(r.src[edge])
            if src not in changing:
                changing[src] = _written_by(r, src, len(self._sent))
            chunk, count = int(r.chunk[edge]), int(r.count[edge])
            chunks = slice(chunk, chunk + count)
            row = [src, chunk, count, int(r.op[edge] == REDUCE), int(changing[src][chunks].any())]
            self.receives.append([*row, int(in_place_before[chunks].max()), int(self._sent[chunks].max())])
            self.receive_rounds.append(number)


def _written_by(r: Round, rank: int, num_chunks: int) -> Ints:
    """Return, for each chunk, whether this round writes it at ``rank``."""
    written = np.zeros(num_chunks, np.int64)
    for edge in np.flatnonzero(r.dst == rank).tolist():
        written[r.chunk[edge] : r.chunk[edge] + r.count[edge]] = 1
    return written
