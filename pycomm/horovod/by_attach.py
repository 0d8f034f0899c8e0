"""Gradients in buckets, in an order that is agreed once: what ``pycomm.attach`` does."""

from __future__ import annotations

from typing import Any

import torch

import pycomm.compression as methods
from pycomm.horovod.arguments import Arguments
from pycomm.horovod.compression import Compression
from pycomm.horovod.process_sets import members_of
from pycomm.horovod.reduce_ops import Average
from pycomm.horovod.state import world
from pycomm.reducer import Reducer, Tuning, attach, broadcast_parameters


class AttachedAveraging:
    """Averaging of the gradients of ``optimizer`` by a Reducer. Collective."""

    def __init__(self, optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
        self._arguments, self._passes = arguments, arguments.passes
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._named = [(name, param) for name, param in arguments.named if id(param) in own]
        self._optimizer, self._world = optimizer, world()
        others = {name: param for name, param in arguments.named if id(param) not in own}  # as of a frozen trunk
        broadcast_parameters(others, process_group=members_of(arguments.process_set).group)
        self.reducer = self._attach()

    def _attach(self) -> Reducer:
        members = members_of(self._arguments.process_set)
        reducer = attach(
            self._optimizer,
            self._named,
            compression=method_of(self._arguments.compression),
            process_group=members.group,
            accumulate=self._passes,
            average=self._arguments.op == Average,
            loss_scaler=self._arguments.loss_scaler,
            tuning=Tuning(timeout=self._world.timeout),
        )
        self._world.attached.add(reducer)
        return reducer

    def synchronize(self) -> None:
        """Reduce what has not been reduced yet; mostly nothing is left to do, as ``backward()`` has done it."""
        self.reducer.reduce_now()

    def set_passes(self, passes: int) -> None:
        """Attach anew, with what compression has not sent yet."""
        state = self.reducer.state_dict()
        self.detach()
        self._passes = passes
        self.reducer = self._attach()
        self.reducer.load_state_dict(state)

    def detach(self) -> None:
        """Reduce no more."""
        self.reducer.detach()
        self._world.attached.discard(self.reducer)


def method_of(compression: Any) -> methods.Compression | str | None:
    """Return pycomm's method for what Horovod calls a compression; raises TypeError if there is none."""
    if compression is None or compression is Compression.none:
        return None
    if compression is Compression.fp16:
        return methods.FP16()
    if isinstance(compression, methods.Compression | str):
        return compression
    raise TypeError(f"compression is {compression!r}, which is none of pycomm's methods")
