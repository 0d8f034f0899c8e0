"""Ranks on this host: start processes, join them in a group, call functions on all of them, leave none behind."""

from pycomm.launching.failures import Failure, RankError, explain
from pycomm.launching.launcher import launch, run_ranks
from pycomm.launching.meeting import PATIENCE, connect, join, rendezvous
from pycomm.launching.pool import Outcome, PerRank, RankPool, StartedRanks
from pycomm.launching.processes import Outputs, Pipe, RankProcesses
from pycomm.launching.reporting import progress
from pycomm.launching.serving import Send, send, serve

__all__ = [
    "PATIENCE",
    "Failure",
    "Outcome",
    "Outputs",
    "PerRank",
    "Pipe",
    "RankError",
    "RankPool",
    "RankProcesses",
    "Send",
    "StartedRanks",
    "connect",
    "explain",
    "join",
    "launch",
    "progress",
    "rendezvous",
    "run_ranks",
    "send",
    "serve",
]
