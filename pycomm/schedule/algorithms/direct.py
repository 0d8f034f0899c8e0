"""Direct: every rank reduces one chunk of all ranks' arrays and sends the result to all.

Steps 2, bytes 2n(P - 1)/P, but 2(P - 1) messages per rank: for few ranks, or ranks with shared memory.
The shared-memory transport's own all-reduce ("native") does this without messages: each input is read
once and each output written once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pycomm.schedule.collective import Schedule, phase
from pycomm.schedule.table import COPY, REDUCE, Round, require_ranks


def direct(num_ranks: int) -> Schedule:
    """Make an all-reduce of two rounds.

    Raises:
        ValueError: ``num_ranks`` < 1.
    """
    num_ranks = require_ranks(num_ranks)

    def generate() -> Iterator[Round]:
        yield from _round(num_ranks, REDUCE)
        yield from _round(num_ranks, COPY)

    return Schedule("direct", num_ranks, num_ranks, generate, turns=True)


def direct_reduce_scatter(num_ranks: int) -> Schedule:
    """Make the first round: rank r ends with the sum of chunk r."""
    return phase("direct_reduce_scatter", "reduce_scatter", num_ranks, lambda size: _round(size, REDUCE))


def direct_all_gather(num_ranks: int) -> Schedule:
    """Make the second round: chunk r of rank r goes to all."""
    return phase("direct_all_gather", "all_gather", num_ranks, lambda size: _round(size, COPY))


def _round(num_ranks: int, op: int) -> Iterator[Round]:
    if num_ranks > 1:
        # Shift by shift, since no two messages of one shift use the same port.
        src = np.tile(np.arange(num_ranks), num_ranks - 1)
        dst = (src + np.repeat(np.arange(1, num_ranks), num_ranks)) % num_ranks
        yield Round.of(src, dst, dst if op == REDUCE else src, 1, op)
