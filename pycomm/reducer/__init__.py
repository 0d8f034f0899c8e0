"""Averaging of gradients over the ranks: ``attach``, and the ``Reducer`` that it returns."""

from pycomm.reducer.attach import attach, join
from pycomm.reducer.attached_training import AttachedTraining
from pycomm.reducer.options import Sharding, Survive, Tuning
from pycomm.reducer.rank_flags import StopRequest
from pycomm.reducer.reducer import Reducer
from pycomm.reducer.stopping import SignalStop, stop_on_signal

__all__ = [
    "AttachedTraining",
    "Reducer",
    "Sharding",
    "SignalStop",
    "StopRequest",
    "Survive",
    "Tuning",
    "attach",
    "join",
    "stop_on_signal",
]
