"""Averaging of gradients over the ranks: ``attach``, and the ``Reducer`` that it returns."""

from pycomm.reducer.attach import attach
from pycomm.reducer.broadcast import broadcast_optimizer_state, broadcast_parameters
from pycomm.reducer.reducer import Reducer

__all__ = ["Reducer", "attach", "broadcast_optimizer_state", "broadcast_parameters"]
