"""Hierarchical, one master per group: reduce to the master, all-reduce among masters, broadcast.

P = num_groups x group_size; a group is ``group_size`` consecutive ranks, its master the first of them.
Only one rank per group uses the slow links, but the whole array crosses them.

With chains in groups of k and a ring among the P/k masters, steps are 4(k - 1) + 2(P/k - 1): for P = 1024
and k = 16 or 32, 186 against the ring's 2046. A master's ports carry n, 2n and n bytes in the three phases,
together 4n. A chain of k chunks fills and drains in 2(k - 1) steps, so the critical path is nearer to 6n.

Jia et al., "Highly scalable deep learning training system with mixed-precision: training ImageNet in
four minutes", arXiv 1807.11205, 2018.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from pycomm.schedule.algorithms.ring import ring
from pycomm.schedule.algorithms.rooted import binomial_broadcast, binomial_reduce, chain_broadcast, chain_reduce
from pycomm.schedule.collective import Schedule
from pycomm.schedule.table import Round, embed, require_ranks

GROUPS: dict[str, tuple[Callable[[int], Schedule], Callable[[int], Schedule]]] = {
    "chain": (chain_reduce, chain_broadcast),
    "binomial": (binomial_reduce, binomial_broadcast),
}
"""Algorithms of a group: the reduction to its master, and the broadcast from it."""


def hierarchical(
    num_groups: int, group_size: int, within: str = "chain", across: Callable[[int], Schedule] = ring
) -> Schedule:
    """Make an all-reduce among ``num_groups * group_size`` ranks by way of masters.

    Args:
        within: the algorithm of a group, of ``GROUPS``. across: the all-reduce of the masters.

    Raises:
        ValueError: ``num_groups`` or ``group_size`` < 1, unknown ``within``.
    """
    num_groups, group_size = require_ranks(num_groups, "num_groups"), require_ranks(group_size, "group_size")
    if within not in GROUPS:
        raise ValueError(f"within is {within!r}, wanted one of {', '.join(GROUPS)}")
    reduce, broadcast = (make(group_size) for make in GROUPS[within])
    masters = across(num_groups)
    num_chunks = math.lcm(reduce.num_chunks, masters.num_chunks)
    grid = np.arange(num_groups * group_size).reshape(num_groups, group_size)

    def generate() -> Iterator[Round]:
        yield from embed(reduce.rounds(), grid, 0, num_chunks // reduce.num_chunks)
        yield from embed(masters.rounds(), grid[:, :1].T, 0, num_chunks // masters.num_chunks)
        yield from embed(broadcast.rounds(), grid, 0, num_chunks // broadcast.num_chunks)

    chosen = "" if (within, masters.name) == ("chain", "ring") else f",{within},{masters.name}"
    return Schedule(f"hierarchical({num_groups},{group_size}{chosen})", grid.size, num_chunks, generate)
