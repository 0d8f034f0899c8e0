"""Ring: every rank passes chunks on to its right neighbor.

Reduce-scatter: P - 1 rounds, in which a chunk's partial sum moves around the ring and each rank adds its
own. All-gather: P - 1 rounds, in which the finished sums move around. All ports are always busy, and only
with neighbors.

Steps 2(P - 1), bytes 2n(P - 1)/P: the least possible, for any P. Best for large arrays on few ranks.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", Journal of
Parallel and Distributed Computing 69(2), 2009.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pycomm.schedule.collective import Schedule, phase
from pycomm.schedule.table import COPY, REDUCE, Round, require_ranks


def ring(num_ranks: int) -> Schedule:
    """Make an all-reduce around a ring.

    Raises:
        ValueError: ``num_ranks`` < 1.
    """
    num_ranks = require_ranks(num_ranks)

    def generate() -> Iterator[Round]:
        yield from _reduce_scatter(num_ranks)
        yield from _all_gather(num_ranks)

    return Schedule("ring", num_ranks, num_ranks, generate, turns=True)


def ring_reduce_scatter(num_ranks: int) -> Schedule:
    """Make the first half: rank r ends with the sum of chunk r."""
    return phase("ring_reduce_scatter", "reduce_scatter", num_ranks, _reduce_scatter)


def ring_all_gather(num_ranks: int) -> Schedule:
    """Make the second half: chunk r of rank r goes to all."""
    return phase("ring_all_gather", "all_gather", num_ranks, _all_gather)


def _reduce_scatter(num_ranks: int) -> Iterator[Round]:
    src = np.arange(num_ranks)
    dst = (src + 1) % num_ranks
    for step in range(num_ranks - 1):
        yield Round.of(src, dst, (src - step - 1) % num_ranks, 1, REDUCE)


def _all_gather(num_ranks: int) -> Iterator[Round]:
    src = np.arange(num_ranks)
    dst = (src + 1) % num_ranks
    for step in range(num_ranks - 1):
        yield Round.of(src, dst, (src - step) % num_ranks, 1, COPY)
