"""Recursive doubling: pairs exchange everything, at distance 1, 2, 4, ...

After round i every rank holds the sum over the 2^(i + 1) ranks around it. It has the fewest steps, but each
moves the whole array: for short messages.

Steps lg P, bytes n lg P for P = 2^m; other P fold (folding.py): two steps and 2n more.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pycomm.schedule.algorithms.folding import core_size, folded
from pycomm.schedule.collective import Schedule
from pycomm.schedule.table import REDUCE, Round, require_ranks


def recursive_doubling(num_ranks: int) -> Schedule:
    """Make an all-reduce by exchanges of whole arrays.

    Raises:
        ValueError: ``num_ranks`` < 1.
    """
    num_ranks = require_ranks(num_ranks)
    return Schedule("recursive_doubling", num_ranks, 1, lambda: folded(num_ranks, 1, _exchanges(core_size(num_ranks))))


def _exchanges(num_ranks: int) -> Iterator[Round]:
    src = np.arange(num_ranks)
    distance = 1
    while distance < num_ranks:
        yield Round.of(src, src ^ distance, 0, 1, REDUCE)
        distance *= 2
