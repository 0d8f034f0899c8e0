"""Circulant: halving and doubling for any number of ranks, at the ring's bytes.

Put the ranks on a circle. At any time s ranks hold live partial sums of chunk c: ranks c, c - 1, ...,
c - s + 1; at first s = P. In a round with s' = ceil(s / 2), rank r sends its sums of the s - s' chunks
r + s', ..., r + s - 1 to rank r + s', which adds them to its own. The sum at offset i in [s', s) becomes
part of the sum at offset i - s', so s' live sums remain, and each contribution is in exactly one of them.
No rank sends a chunk that it receives in the same round, as s - s' <= s'. When s = 1, rank r owns chunk r.
The all-gather runs the same edges backwards.

Steps: 2 ceil(lg P). Bytes sent and received by every rank, and bytes on the critical path: 2n(P - 1)/P, for
every P; halving and doubling reaches this for powers of two only. Binary blocks have more bytes at 2^m - 1
and more messages at 2^m + 1 (binary_blocks.py). The price: a range of chunks that wraps around from P - 1
to 0 is sent as two messages. In every round this happens at other ranks, so the critical path has nearly
twice as many messages as steps.

The largest messages go half around the circle. ``group_size`` assigns the circle's places so that they stay
within a host where possible: rank g * group_size + l gets place l * num_groups + g, and as long as s' is a
multiple of num_groups, partners have the same g.

Bruck and Ho, "Efficient global combine operations in multi-port message-passing systems", Parallel
Processing Letters 3(4), 1993; Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms",
arXiv 2410.14234, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pycomm.schedule.collective import Schedule, phase
from pycomm.schedule.table import COPY, REDUCE, Ints, Round, embed, require_ranks


def circulant(num_ranks: int, group_size: int = 1) -> Schedule:
    """Make an all-reduce on a circulant graph; each ``group_size`` consecutive ranks share a host.

    Raises:
        ValueError: ``num_ranks`` < 1, or ``group_size`` does not divide it.
    """
    places = _places(num_ranks, group_size)

    def generate() -> Iterator[Round]:
        yield from embed(_reduce_scatter(num_ranks), places, 0, 1)
        yield from embed(_all_gather(num_ranks), places, 0, 1)

    return Schedule(_name("circulant", group_size), num_ranks, num_ranks, generate)


def circulant_reduce_scatter(num_ranks: int, group_size: int = 1) -> Schedule:
    """Make the first half: the rank at place c ends with the sum of chunk c."""
    return _phase("reduce_scatter", _reduce_scatter, num_ranks, group_size)


def circulant_all_gather(num_ranks: int, group_size: int = 1) -> Schedule:
    """Make the second half: chunk c of the rank at place c goes to all."""
    return _phase("all_gather", _all_gather, num_ranks, group_size)


def _phase(goal: str, rounds: Callable[[int], Iterator[Round]], num_ranks: int, group_size: int) -> Schedule:
    places = _places(num_ranks, group_size)
    name = _name(f"circulant_{goal}", group_size)
    return phase(name, goal, num_ranks, lambda size: embed(rounds(size), places, 0, 1), places[0])


def _name(base: str, group_size: int) -> str:
    return base if group_size == 1 else f"{base}({group_size})"


def _places(num_ranks: int, group_size: int) -> Ints:
    """Return the rank at each place of the circle: [1, P]."""
    num_ranks = require_ranks(num_ranks)
    group_size = require_ranks(group_size, "group_size")
    if num_ranks % group_size:
        raise ValueError(f"group_size is {group_size}, wanted a divisor of num_ranks, which is {num_ranks}")
    return np.arange(num_ranks).reshape(-1, group_size).T.reshape(1, num_ranks)


def _live(num_ranks: int) -> list[tuple[int, int]]:
    """Return (s, s') of every round."""
    pairs, live = [], num_ranks
    while live > 1:
        pairs.append((live, (live + 1) // 2))
        live = pairs[-1][1]
    return pairs


def _reduce_scatter(num_ranks: int) -> Iterator[Round]:
    rank = np.arange(num_ranks)
    for live, left in _live(num_ranks):
        partner = (rank + left) % num_ranks
        yield _wrapped(rank, partner, partner, live - left, REDUCE)


def _all_gather(num_ranks: int) -> Iterator[Round]:
    rank = np.arange(num_ranks)
    for live, left in reversed(_live(num_ranks)):
        yield _wrapped(rank, (rank - left) % num_ranks, rank, live - left, COPY)


def _wrapped(src: Ints, dst: Ints, begin: Ints, count: int, op: int) -> Round:
    """Make a round that moves ranges of chunks modulo P; ranges that pass P - 1 become two edges."""
    num_chunks = len(src)
    head = np.minimum(count, num_chunks - begin)
    one = np.repeat(np.arange(num_chunks), np.where(head < count, 2, 1))
    second = np.concatenate([[False], one[1:] == one[:-1]])
    return Round.of(
        src[one], dst[one], np.where(second, 0, begin[one]), np.where(second, count - head[one], head[one]), op
    )
