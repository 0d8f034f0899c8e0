"""Averaging of gradients over the ranks: ``attach``, and the ``Reducer`` that it returns."""

from pycomm.broadcasting import broadcast_optimizer_state, broadcast_parameters
from pycomm.reducer.attach import attach
from pycomm.reducer.rank_flags import StopRequest
from pycomm.reducer.reducer import Reducer
from pycomm.reducer.stopping import SignalStop, stop_on_signal

__all__ = [
    "Reducer",
    "SignalStop",
    "StopRequest",
    "attach",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "stop_on_signal",
]
