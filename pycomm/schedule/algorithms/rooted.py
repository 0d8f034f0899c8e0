"""Reductions to rank 0 and broadcasts from it: the phases of hierarchical.py, and collectives of their own.

Chain: rank 0 is the end of a line through which P chunks pass in a pipeline. Steps 2(P - 1), bytes
2n(P - 1)/P on the critical path; each rank sends n.

Binomial: a tree in which every rank that has the array sends it on, at distance 1, 2, 4, ...; steps
ceil(lg P), bytes n ceil(lg P). For short arrays.

A reduction is a ``reduce_scatter``, and a broadcast an ``all_gather``, whose chunks all belong to rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pycomm.schedule.collective import Schedule
from pycomm.schedule.table import COPY, REDUCE, Round, require_ranks


def chain_reduce(num_ranks: int) -> Schedule:
    """Make a reduction along the line P - 1, ..., 1, 0."""
    return _rooted("chain_reduce", num_ranks, num_ranks, "reduce_scatter", lambda: _chain(num_ranks, REDUCE))


def chain_broadcast(num_ranks: int) -> Schedule:
    """Make a broadcast along the line 0, 1, ..., P - 1."""
    return _rooted("chain_broadcast", num_ranks, num_ranks, "all_gather", lambda: _chain(num_ranks, COPY))


def binomial_reduce(num_ranks: int) -> Schedule:
    """Make a reduction up a binomial tree."""
    return _rooted("binomial_reduce", num_ranks, 1, "reduce_scatter", lambda: _binomial(num_ranks, REDUCE))


def binomial_broadcast(num_ranks: int) -> Schedule:
    """Make a broadcast down a binomial tree."""
    return _rooted("binomial_broadcast", num_ranks, 1, "all_gather", lambda: _binomial(num_ranks, COPY))


def _rooted(name: str, num_ranks: int, num_chunks: int, goal: str, generate: Callable[[], Iterator[Round]]) -> Schedule:
    return Schedule(name, require_ranks(num_ranks), num_chunks, generate, goal, np.zeros(num_chunks, np.int64))


def _chain(num_ranks: int, op: int) -> Iterator[Round]:
    for step in range(2 * (num_ranks - 1)):
        # Link i joins ranks i and i + 1.
        link = np.arange(num_ranks - 1)
        chunk = step - link if op == COPY else step - (num_ranks - 2 - link)
        active = (chunk >= 0) & (chunk < num_ranks)
        near, far, chunk = link[active], link[active] + 1, chunk[active]
        yield Round.of(near, far, chunk, 1, op) if op == COPY else Round.of(far, near, chunk, 1, op)


def _binomial(num_ranks: int, op: int) -> Iterator[Round]:
    distances = [1 << i for i in range((num_ranks - 1).bit_length())]
    for distance in distances if op == REDUCE else reversed(distances):
        near = np.arange(0, num_ranks - distance, 2 * distance)
        far = near + distance
        yield Round.of(near, far, 0, 1, op) if op == COPY else Round.of(far, near, 0, 1, op)
