"""Proof that a schedule computes what it claims.

The table is executed symbolically, with contributions instead of numbers. Each place (rank, chunk) has a
vector: how often each rank's contribution is in it, never, once or more often. For many ranks two numbers
replace the vector. One is the number of contributions, counted up to the number of ranks plus one. The
other is a fingerprint: rank r contributes a random number modulo a prime near 2^50, and a place is right
if it holds the sum of the right numbers. A wrong place with the right number of contributions has the
right fingerprint with a probability of about 2^-50, for any table: its error is a combination of the
random numbers whose factors are smaller than the prime and not all zero.

Progress. A rank that enters a round offers all its messages of that round, and leaves the round when
they are done (rendezvous: a message requires both sides). The rank that is furthest behind waits only for
ranks that are in the same round or will come to it, so some message can always move, unless a rank sends
to itself. Messages offered one by one, in the order of the table, make progress too: the first unfinished
message of the table is the next one of both its ends.

Mixing (mixing.py). The same contributions run through the messages, all of which add, for as many cycles
as there are ranks. At the end each contribution must be everywhere, once or more often. The weights are
checked round by round: what each rank keeps and sends sums to 1. As every weight is positive, repeated
rounds converge to the mean over all ranks: directly if the weights are doubly stochastic, else by push-sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from pycomm.schedule.mixing import Floats, Mixing, WeightedRound
from pycomm.schedule.table import COPY, GOALS, REDUCE, Ints, Round, Table, expand

_PRIME = (1 << 50) - 27
_TERMS = 1 << 13  # the sum of this many residues fits 64 bits
_MOST_RANKS = 1 << 14
_MOST_PLACES = 1 << 25
_EXACT_RANKS = 64
_TOLERANCE = 1e-9
"""Largest error of a sum of weights; a weight that is no larger counts as zero."""
_OP_NAMES = {COPY: "COPY", REDUCE: "REDUCE"}

Residues = npt.NDArray[np.uint64]


class ScheduleError(ValueError):
    """Table does not do what it claims; the message names round, edge and chunk if there is one."""


def verify(schedule: Table | Mixing, exact: bool | None = None, seed: int = 0) -> None:
    """Raise ScheduleError unless the table is right.

    Args:
        schedule: a schedule, or any object with ``num_ranks``, ``num_chunks`` and ``rounds()``,
            which then claims to be an all-reduce; or what :func:`pycomm.schedule.mixing` makes.
        exact: track each contribution (memory: ranks^2 x chunks) instead of fingerprints; ``None``: up to
            64 ranks. In mixing they are always tracked.
        seed: seed of the fingerprints.

    Raises:
        ScheduleError: a rank does not end with the right contributions, exactly once, in each chunk; a COPY
            writes a place that another edge of its round reads or writes; an index is out of range; a rank
            sends to itself; ``schedule`` is not a table. Mixing: what a rank keeps and sends does not sum to
            1, nor, if it claims to be doubly stochastic, what it keeps and receives; a weight is not
            positive; a rank's value does not reach another within as many cycles as there are ranks.
    """
    try:
        _verify(schedule, exact, seed)
    except ScheduleError:
        raise
    except Exception as error:  # strange objects, and sizes, may raise anything
        raise ScheduleError(f"this is not a table that can be verified: {told(error)}") from None


def _verify(schedule: Table | Mixing, exact: bool | None, seed: int) -> None:
    num_ranks, num_chunks = size_of(schedule, "num_ranks"), size_of(schedule, "num_chunks")
    if num_ranks > _MOST_RANKS or num_ranks * num_chunks > _MOST_PLACES:
        raise ScheduleError(
            f"num_ranks is {num_ranks} and num_chunks {num_chunks}, more than can be verified: wanted at most "
            f"{_MOST_RANKS} ranks, and {_MOST_PLACES} places"
        )
    goal, owners = _claim(schedule, num_chunks, num_ranks)
    if goal == "mixing":
        return _verify_mixing(schedule, num_ranks, num_chunks)
    values = _Values(num_ranks, num_ranks <= _EXACT_RANKS if exact is None else exact, seed)
    state = np.repeat(values.contributions, num_chunks, axis=0)  # place = rank * num_chunks + chunk
    places = _ChunkPlaces(num_ranks * num_chunks)
    for number, edges in enumerate(_rounds(schedule)):
        _apply(state, values, places, _checked(edges, number, num_ranks, num_chunks), number, num_chunks)
    _require_goal(state.reshape(num_ranks, num_chunks, -1), values, goal, owners)


def told(error: Exception) -> str:
    """Return what ``error`` says, even of one that cannot be printed."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # it cannot even be printed
        return type(error).__name__


def size_of(schedule: Any, name: str) -> int:
    """Return the attribute ``name`` as an int; raise ScheduleError unless it is a whole number of at least 1."""
    try:
        value = getattr(schedule, name)
        size = int(value)
        whole = size == value
    except Exception as error:
        raise ScheduleError(f"{name} cannot be read: {error!r}") from error
    if not whole or size < 1:
        raise ScheduleError(f"{name} is {value!r}, wanted a whole number of at least 1")
    return size


def _claim(schedule: Any, num_chunks: int, num_ranks: int) -> tuple[str, Ints | None]:
    goal, owners = getattr(schedule, "goal", "all_reduce"), getattr(schedule, "owners", None)
    if not isinstance(goal, str) or goal not in GOALS:
        raise ScheduleError(f"goal is {goal!r}, wanted one of {', '.join(GOALS)}")
    if goal in ("all_reduce", "mixing"):
        return goal, None
    owners = integers(owners, "owners")
    if len(owners) != num_chunks or ((owners < 0) | (owners >= num_ranks)).any():
        raise ScheduleError(f"owners is {owners!r}, wanted a rank for each of the {num_chunks} chunks")
    return goal, owners


class _Values:
    """Values of places, [K] numbers each, and their addition.

    Attributes:
        contributions: [P, K]. If exact, unit vectors, whose sums saturate at 2. Otherwise a residue, and a
            count that saturates at P + 1.
        total: [K], the sum of each contribution once.
    """

    def __init__(self, num_ranks: int, exact: bool, seed: int) -> None:
        self.exact = exact
        self._limit = np.uint64(2 if exact else num_ranks + 1)
        if exact:
            self.contributions = np.eye(num_ranks, dtype=np.uint64)
        else:
            residues = np.random.default_rng(seed).integers(1, _PRIME, num_ranks, np.uint64)
            self.contributions = np.stack([residues, np.ones(num_ranks, np.uint64)], 1)
        self.total = self.sums(self.contributions, np.zeros(num_ranks, np.int64))[0][0]

    def settle(self, sums: Residues, terms: int) -> Residues:
        """Turn sums of up to ``terms`` <= ``_TERMS`` values into values, in place."""
        if self.exact:
            return np.minimum(sums, self._limit, out=sums)
        residues, counts = sums[:, 0], sums[:, 1]
        if terms == 2:  # several times faster than a division
            np.subtract(residues, np.uint64(_PRIME), out=residues, where=residues >= _PRIME)
        else:
            np.remainder(residues, np.uint64(_PRIME), out=residues)
        np.minimum(counts, self._limit, out=counts)
        return sums

    def sums(self, moved: Residues, written: Ints) -> tuple[Residues, Ints]:
        """Return the sum of what goes into each place, and the places."""
        order = np.argsort(written, kind="stable")
        moved, written = moved[order], written[order]
        while True:
            first = np.append(True, written[1:] != written[:-1])
            starts = np.flatnonzero(first)
            # Long runs are summed in pieces, repeatedly.
            within = np.arange(len(written)) - np.repeat(starts, np.diff(starts, append=len(written)))
            starts = np.flatnonzero(within % _TERMS == 0)
            moved, written = self.settle(np.add.reduceat(moved, starts, axis=0), _TERMS), written[starts]
            if len(written) == np.count_nonzero(first):
                return moved, written


def _rounds(schedule: Any) -> Iterator[Any]:
    try:
        yield from schedule.rounds()
    except Exception as error:
        raise ScheduleError(f"rounds() failed: {error!r}") from error


def _checked(edges: Any, number: int, num_ranks: int, num_chunks: int) -> Round:
    """Return ``edges`` as a round whose columns are integers in range."""
    try:
        columns = list(edges)
    except Exception:
        raise ScheduleError(f"round {number} is {edges!r}, wanted five columns") from None
    if len(columns) != len(Round._fields):
        raise ScheduleError(f"round {number} has {len(columns)} columns, wanted {', '.join(Round._fields)}")
    r = Round(*(integers(c, f"round {number}: {f}") for f, c in zip(Round._fields, columns, strict=True)))
    lengths = [len(column) for column in r]
    if len(set(lengths)) > 1:
        raise ScheduleError(f"round {number} has columns of lengths {lengths}, wanted equal ones")
    for field, column, limit in (("src", r.src, num_ranks), ("dst", r.dst, num_ranks), ("chunk", r.chunk, num_chunks)):
        _refuse(r, number, (column < 0) | (column >= limit), f"{field} is not in 0 ... {limit - 1}")
    _refuse(r, number, (r.op != COPY) & (r.op != REDUCE), f"op is neither COPY ({COPY}) nor REDUCE ({REDUCE})")
    _refuse(r, number, r.count < 1, "count is less than 1")
    # Not chunk + count, which could overflow.
    _refuse(r, number, r.count > num_chunks - r.chunk, f"chunk + count is beyond the {num_chunks} chunks")
    _refuse(r, number, r.src == r.dst, "a rank sends to itself, and would wait forever")
    return r


def integers(column: Any, what: str) -> Ints:
    """Return ``column`` as int64; raise ScheduleError unless it is one-dimensional and of integers."""
    try:
        array = np.asarray(column)
        if array.ndim == 1 and (array.dtype.kind == "i" or (array.dtype.kind == "u" and array.itemsize < 8)):
            return array.astype(np.int64, copy=False)
        if array.ndim == 1 and array.size == 0:
            return np.empty(0, np.int64)
    except Exception:
        raise ScheduleError(f"{what} is {column!r}, wanted a column of integers") from None
    raise ScheduleError(f"{what} is {column!r}, wanted a column of integers")


def _refuse(r: Round, number: int, wrong: npt.NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        _fail(r, number, int(np.argmax(wrong)), None, why)


def _fail(r: Round, number: int, edge: int, chunk: int | None, why: str) -> NoReturn:
    op = _OP_NAMES.get(int(r.op[edge]), str(r.op[edge]))
    at = "" if chunk is None else f", chunk {chunk}"
    raise ScheduleError(
        f"round {number}, edge {edge} ({op} from {r.src[edge]} to {r.dst[edge]}, chunk {r.chunk[edge]}, "
        f"count {r.count[edge]}){at}: {why}"
    )


class _ChunkPlaces:
    """Last reader and writer of each place, as stamps, so that nothing has to be cleared between rounds."""

    def __init__(self, num_places: int) -> None:
        self._read = np.full(num_places, -1, np.int64)
        self._written = np.full(num_places, -1, np.int64)
        self._base = 0

    def require_no_conflict(self, r: Round, number: int, moves: tuple[Ints, Ints, Ints], num_chunks: int) -> Ints:
        """Raise if a COPY writes what another edge reads or writes; return the moves that a later one overwrites."""
        edge, read, written = moves
        stamp = self._base + np.arange(len(edge))
        self._read[read] = self._base
        self._written[written] = stamp
        overtaken = np.flatnonzero(self._written[written] != stamp)
        copies = r.op[edge] == COPY
        torn = np.flatnonzero(copies & (self._read[written] >= self._base))
        if len(torn):
            _fail(r, number, int(edge[torn[0]]), int(written[torn[0]] % num_chunks), "its round also reads that place")
        if len(overtaken) and copies.any():
            shared = np.isin(written, written[overtaken]) & copies
            if shared.any():
                at = int(np.argmax(shared))
                why = "another edge of its round also writes that place"
                _fail(r, number, int(edge[at]), int(written[at] % num_chunks), why)
        self._base += len(edge)
        return overtaken


def _apply(state: Residues, values: _Values, places: _ChunkPlaces, r: Round, number: int, num_chunks: int) -> None:
    moves = expand(r, num_chunks)
    overtaken = places.require_no_conflict(r, number, moves, num_chunks)
    edge, read, written = moves
    moved, reduces = state[read], r.op[edge] == REDUCE
    if len(overtaken):  # several REDUCEs into one place: their sum first
        _, first = np.unique(written, return_index=True)
        reduces = reduces[first]
        moved, written = values.sums(moved, written)
    if reduces.all():
        moved += state[written]
    elif reduces.any():
        moved[reduces] += state[written[reduces]]
    state[written] = values.settle(moved, 2)


def _require_goal(state: Residues, values: _Values, goal: str, owners: Ints | None) -> None:
    if goal == "all_reduce":
        right = (state == values.total).all(-1)
    else:
        assert owners is not None
        if goal == "all_gather":
            right = (state == values.contributions[owners]).all(-1)
        else:
            right = np.ones(state.shape[:2], bool)
            chunks = np.arange(len(owners))
            right[owners, chunks] = (state[owners, chunks] == values.total).all(-1)
    if not right.all():
        rank, chunk = (int(i) for i in np.argwhere(~right)[0])
        held = _difference(state[rank, chunk], goal, values.exact)
        raise ScheduleError(f"after the last round, rank {rank}, chunk {chunk}: {held}")


def _difference(held: Residues, goal: str, exact: bool) -> str:
    wanted = "the contribution of its owner, once" if goal == "all_gather" else "each contribution once"
    if not exact:
        return f"wanted {wanted}; it has {int(held[1])} contributions, or not those"
    often = {0: "not at all", 2: "more than once"}
    found = ", ".join(f"rank {p}'s {often[int(n)]}" for p, n in enumerate(held) if n != 1)
    return f"wanted {wanted}; it has {found or 'all of them'}"


def _verify_mixing(schedule: Any, num_ranks: int, num_chunks: int) -> None:
    if num_chunks != 1 or num_ranks**2 > _MOST_PLACES:
        most = math.isqrt(_MOST_PLACES)
        raise ScheduleError(f"mixing is of {num_chunks} chunks among {num_ranks} ranks, wanted 1, and at most {most}")
    doubly = bool(getattr(schedule, "doubly_stochastic", False))
    turn = [_checked_mixing(given, number, num_ranks, doubly) for number, given in enumerate(_rounds(schedule))]
    if not turn:
        raise ScheduleError("mixing has no rounds, wanted at least one")
    values = _Values(num_ranks, True, 0)
    state, places = values.contributions.copy(), _ChunkPlaces(num_ranks)
    for _ in range(num_ranks):
        for number, messages in enumerate(turn):
            if state.all():  # and stays so, as every rank keeps a share of its own
                return
            _apply(state, values, places, messages, number, num_chunks)
    if not state.all():
        i, j = np.argwhere(state == 0)[0]
        within = f"within {num_ranks} turns, as many as there are ranks"
        raise ScheduleError(f"with these weights rank {i} never hears of rank {j}: not {within}")


def _checked_mixing(given: Any, number: int, num_ranks: int, doubly: bool) -> Round:
    """Return the messages of a round of mixing whose weights are right."""
    try:
        messages, weights, kept = given
    except Exception:
        raise ScheduleError(f"round {number} is {given!r}, wanted {', '.join(WeightedRound._fields)}") from None
    r = _checked(messages, number, num_ranks, 1)
    _refuse(r, number, r.op != REDUCE, "mixing adds what comes, so op must be REDUCE")
    weights = _numbers(weights, r.num_edges, f"round {number}: weights")
    kept = _numbers(kept, num_ranks, f"round {number}: kept")
    _refuse(r, number, ~(weights > _TOLERANCE), f"its weight is not positive, above {_TOLERANCE:g}")
    light = np.flatnonzero(~(kept > _TOLERANCE))
    if len(light):
        keeps = f"rank {light[0]} keeps {kept[light[0]]:g} of its own"
        raise ScheduleError(f"round {number}: {keeps}, wanted a positive weight, above {_TOLERANCE:g}")
    _require_sums(kept + np.bincount(r.src, weights, num_ranks), number, "sends", "")
    if doubly:
        claim = ", as this claims to be doubly stochastic"
        _require_sums(kept + np.bincount(r.dst, weights, num_ranks), number, "is sent", claim)
    return r


def _numbers(column: Any, length: int, what: str) -> Floats:
    try:
        array = np.asarray(column, np.float64)
    except Exception:
        raise ScheduleError(f"{what} is {column!r}, wanted a column of numbers") from None
    if array.shape != (length,):
        raise ScheduleError(f"{what} has shape {list(array.shape)}, wanted {length} numbers")
    return array


def _require_sums(sums: Floats, number: int, moves: str, why: str) -> None:
    wrong = ~(np.abs(sums - 1) <= _TOLERANCE)
    if wrong.any():
        rank = int(np.argmax(wrong))
        raise ScheduleError(
            f"round {number}: what rank {rank} keeps and {moves} sums to {sums[rank]:.12g}, wanted 1{why}"
        )
