"""Schedules: collectives as data, which are generated, verified, priced and chosen. Requires numpy only.

    s = schedule.binary_blocks(600)            # who sends what to whom, round by round
    schedule.verify(s)                         # every rank ends with every contribution exactly once
    s.stats()["critical"]                      # bytes on the critical path, in multiples of the array's
    schedule.simulate(s, 100e6, "ethernet-10g")  # seconds on a described network

See docs/algorithms.md for the algorithms, :meth:`pycomm.Communicator.all_reduce` for running them.
"""

from pycomm.schedule import pipeline
from pycomm.schedule.algorithms import (
    binary_blocks,
    by_name,
    circulant,
    direct,
    double_tree,
    halving_doubling,
    hierarchical,
    names,
    recursive_doubling,
    ring,
    torus,
)
from pycomm.schedule.choose import Ranking, candidates, choose, rank_algorithms
from pycomm.schedule.collective import Schedule, Stats
from pycomm.schedule.mixing import Mixing, WeightedRound, mixing
from pycomm.schedule.network import DEFAULT_NETWORK, NETWORKS, Link, Network, load
from pycomm.schedule.simulate import simulate
from pycomm.schedule.table import COPY, REDUCE, Round
from pycomm.schedule.verify import ScheduleError, verify

__all__ = [
    "COPY",
    "DEFAULT_NETWORK",
    "NETWORKS",
    "REDUCE",
    "Link",
    "Mixing",
    "Network",
    "Ranking",
    "Round",
    "Schedule",
    "ScheduleError",
    "Stats",
    "WeightedRound",
    "binary_blocks",
    "by_name",
    "candidates",
    "choose",
    "circulant",
    "direct",
    "double_tree",
    "halving_doubling",
    "hierarchical",
    "load",
    "mixing",
    "names",
    "pipeline",
    "rank_algorithms",
    "recursive_doubling",
    "ring",
    "simulate",
    "torus",
    "verify",
]
