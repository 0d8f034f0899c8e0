"""pycomm in a training loop: ``attach`` and what it returns."""

from pycomm.optim.attach import attach
from pycomm.optim.broadcast import broadcast_optimizer_state, broadcast_parameters
from pycomm.optim.reducer import Reducer

__all__ = ["Reducer", "attach", "broadcast_optimizer_state", "broadcast_parameters"]
