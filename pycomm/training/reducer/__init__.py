"""Averaging of gradients over the ranks: ``attach``, and the ``Reducer`` that it returns."""

from pycomm.training.reducer.attach import attach, join
from pycomm.training.reducer.autograd_hooks import FinalCallback
from pycomm.training.reducer.rank_flags import (
    Record,
    SignalStop,
    StopRequest,
    first_stop,
    raise_left_out,
    stop_on_signal,
)
from pycomm.training.reducer.reducer import AttachedTraining, Reducer
from pycomm.training.reducer.replica_differences import Hashes, ReplicaDifferences, is_comparison_due
from pycomm.training.reducer.settings import Sharding, Survive, Tuning
from pycomm.training.reducer.window import HostCopy

__all__ = [
    "AttachedTraining",
    "FinalCallback",
    "Hashes",
    "HostCopy",
    "Record",
    "Reducer",
    "ReplicaDifferences",
    "Sharding",
    "SignalStop",
    "StopRequest",
    "Survive",
    "Tuning",
    "attach",
    "first_stop",
    "is_comparison_due",
    "join",
    "raise_left_out",
    "stop_on_signal",
]
