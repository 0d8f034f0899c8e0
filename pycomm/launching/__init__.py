"""Ranks on this host: start their processes, join them in a group, listen to them, leave none of them behind."""

from pycomm.launching.failures import Failure, RankError, explain
from pycomm.launching.launcher import launch
from pycomm.launching.local_ranks import LocalRanks, Pipe
from pycomm.launching.meeting import PATIENCE, connect, join, rendezvous
from pycomm.launching.reporting import progress
from pycomm.launching.running import Tell, run_ranks

__all__ = [
    "PATIENCE",
    "Failure",
    "LocalRanks",
    "Pipe",
    "RankError",
    "Tell",
    "connect",
    "explain",
    "join",
    "launch",
    "progress",
    "rendezvous",
    "run_ranks",
]
