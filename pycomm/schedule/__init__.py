"""Schedules: collectives as data, which are generated, verified, priced and chosen. Requires numpy only.

    s = schedule.binary_blocks(600)            # who sends what to whom, round by round
    schedule.verify(s)                         # every rank ends with every contribution exactly once
    s.stats()["critical"]                      # bytes on the critical path, in multiples of the array's
    schedule.simulate(s, 100e6, "ethernet-10g")  # seconds on a described network

See docs/algorithms.md for the algorithms, :meth:`pycomm.Communicator.all_reduce` for running them.
"""

import importlib as _importlib
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from pycomm.checks import public_names as _public_names
from pycomm.schedule.algorithms import binary_blocks as binary_blocks
from pycomm.schedule.algorithms import by_name as by_name
from pycomm.schedule.algorithms import circulant as circulant
from pycomm.schedule.algorithms import direct as direct
from pycomm.schedule.algorithms import double_tree as double_tree
from pycomm.schedule.algorithms import halving_doubling as halving_doubling
from pycomm.schedule.algorithms import hierarchical as hierarchical
from pycomm.schedule.algorithms import names as names
from pycomm.schedule.algorithms import recursive_doubling as recursive_doubling
from pycomm.schedule.algorithms import ring as ring
from pycomm.schedule.algorithms import torus as torus
from pycomm.schedule.choose import Ranking as Ranking
from pycomm.schedule.choose import candidates as candidates
from pycomm.schedule.choose import choose as choose
from pycomm.schedule.choose import rank_algorithms as rank_algorithms
from pycomm.schedule.collective import Schedule as Schedule
from pycomm.schedule.collective import Stats as Stats
from pycomm.schedule.mixing import Mixing as Mixing
from pycomm.schedule.mixing import WeightedRound as WeightedRound
from pycomm.schedule.mixing import mixing as mixing
from pycomm.schedule.network import DEFAULT_NETWORK as DEFAULT_NETWORK
from pycomm.schedule.network import NETWORKS as NETWORKS
from pycomm.schedule.network import Link as Link
from pycomm.schedule.network import Network as Network
from pycomm.schedule.network import load as load
from pycomm.schedule.program import program_of as program_of
from pycomm.schedule.simulate import simulate as simulate
from pycomm.schedule.table import COPY as COPY
from pycomm.schedule.table import REDUCE as REDUCE
from pycomm.schedule.table import Round as Round
from pycomm.schedule.verify import ScheduleError as ScheduleError
from pycomm.schedule.verify import verify as verify

if _TYPE_CHECKING:  # imported at first use: `attach` needs none of it
    from pycomm.schedule import pipeline as pipeline

__all__ = [*_public_names(globals()), "pipeline"]


def __getattr__(name: str) -> _ModuleType:
    if name == "pipeline":
        return _importlib.import_module("pycomm.schedule.pipeline")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
