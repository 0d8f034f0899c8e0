"""Folding: extends an algorithm for 2^m ranks to any number of them.

P = P' + E ranks, with P' = 2^m the largest power of two. In E pairs of neighbors the odd rank sends its
array to the even one, takes no part, and receives the result at the end. This costs two more steps and 2n
more bytes, while E ranks are idle in the middle.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pycomm.schedule.table import COPY, REDUCE, Ints, Round, embed


def core_size(num_ranks: int) -> int:
    """Return the largest power of two up to ``num_ranks``."""
    return 1 << (num_ranks.bit_length() - 1)


def folded(num_ranks: int, num_chunks: int, rounds: Iterable[Round]) -> Iterator[Round]:
    """Extend ``rounds``, an all-reduce among ``core_size(num_ranks)`` ranks on ``num_chunks`` chunks, to all ranks."""
    core = core_size(num_ranks)
    extra = num_ranks - core
    even: Ints = 2 * np.arange(extra)
    members = np.concatenate([even, np.arange(2 * extra, num_ranks)])
    if extra:
        yield Round.of(even + 1, even, 0, num_chunks, REDUCE)
    yield from embed(rounds, members[None, :], 0, 1)
    if extra:
        yield Round.of(even, even + 1, 0, num_chunks, COPY)
