"""Recursive halving and doubling: a reduce-scatter by halves, then the all-gather that undoes it.

In round i of the reduce-scatter, partners at distance 2^i split the range that both still reduce: each
sends the other's half. The largest messages go to the nearest partner, where links tend to be fast. The
all-gather runs the same exchanges backwards.

Steps 2 lg P, bytes 2n(P - 1)/P for P = 2^m: the ring's bytes in the fewest steps. Other P fold
(folding.py): 2 floor(lg P) + 2 steps and 2n more bytes.

Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur et al. 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pycomm.schedule.algorithms.folding import core_size, folded
from pycomm.schedule.collective import Schedule, phase
from pycomm.schedule.table import COPY, REDUCE, Ints, Round, require_ranks


def halving_doubling(num_ranks: int) -> Schedule:
    """Make an all-reduce by recursive halving and doubling.

    Raises:
        ValueError: ``num_ranks`` < 1.
    """
    num_ranks = require_ranks(num_ranks)
    core = core_size(num_ranks)

    def rounds() -> Iterator[Round]:
        yield from halving(core)
        yield from doubling(core)

    return Schedule("halving_doubling", num_ranks, core, lambda: folded(num_ranks, core, rounds()))


def halving_reduce_scatter(num_ranks: int) -> Schedule:
    """Make the first half: rank r ends with the sum of the chunk whose number is r with its bits reversed."""
    return phase("halving_reduce_scatter", "reduce_scatter", num_ranks, halving, _bit_reversed(num_ranks))


def doubling_all_gather(num_ranks: int) -> Schedule:
    """Make the second half: the chunk whose number is r with its bits reversed goes from rank r to all."""
    return phase("doubling_all_gather", "all_gather", num_ranks, doubling, _bit_reversed(num_ranks))


def piece_begin(num_ranks: int, parts: int) -> Ints:
    """Return the first chunk of each rank's range once the ``num_ranks`` chunks are cut into ``parts`` = 2^i.

    Bit i of the rank decides between the halves in round i.
    """
    rank = np.arange(num_ranks)
    begin = np.zeros(num_ranks, np.int64)
    distance, width = 1, num_ranks
    while distance < parts:
        width //= 2
        begin += np.where(rank & distance, width, 0)
        distance *= 2
    return begin


def halving(num_ranks: int) -> Iterator[Round]:
    """Generate the reduce-scatter among 2^m ranks on as many chunks."""
    rank = np.arange(num_ranks)
    distance = 1
    while distance < num_ranks:
        width = num_ranks // (2 * distance)
        kept = piece_begin(num_ranks, 2 * distance)
        yield Round.of(rank, rank ^ distance, kept[rank ^ distance], width, REDUCE)
        distance *= 2


def doubling(num_ranks: int) -> Iterator[Round]:
    """Generate the all-gather that undoes :func:`halving`."""
    rank = np.arange(num_ranks)
    distance = num_ranks // 2
    while distance >= 1:
        width = num_ranks // (2 * distance)
        yield Round.of(rank, rank ^ distance, piece_begin(num_ranks, 2 * distance), width, COPY)
        distance //= 2


def _bit_reversed(num_ranks: int) -> Ints:
    """Return the owner of each chunk; raise ValueError unless ``num_ranks`` is a power of two."""
    num_ranks = require_ranks(num_ranks)
    if core_size(num_ranks) != num_ranks:
        raise ValueError(f"num_ranks is {num_ranks}, wanted a power of two: halving does not factor it")
    return np.argsort(piece_begin(num_ranks, num_ranks))
