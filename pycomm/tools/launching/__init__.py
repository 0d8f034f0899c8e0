"""Ranks on this host: start processes, join them in a group, call functions on all of them, leave none behind."""

from pycomm.tools.launching.launcher import launch, run_ranks
from pycomm.tools.launching.pool import PerRank, RankOutcome, RankPool, StartedRanks
from pycomm.tools.launching.processes import PATIENCE, Outputs, Pipe, RankProcesses, connect, join, rendezvous
from pycomm.tools.launching.reporting import progress
from pycomm.tools.launching.serving import Failure, RankError, Send, explain, send, serve

__all__ = [
    "PATIENCE",
    "Failure",
    "Outputs",
    "PerRank",
    "Pipe",
    "RankError",
    "RankOutcome",
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
