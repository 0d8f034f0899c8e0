"""State of training that is kept in memory, to go back to when ranks are lost."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pycomm.horovod.basics import rank
from pycomm.horovod.elastic.sampler import ElasticSampler
from pycomm.horovod.errors import HostsUpdatedInterrupt
from pycomm.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from pycomm.horovod.optimizer import control_of

NO_UPDATE, REMOVED, ADDED = 0, 1, 2
"""What has become of the job's hosts; of both, the sum."""


class State:
    """State that :func:`run` saves, restores and makes equal on all ranks. Derive from it.

    Args:
        bcast_object: broadcasts an object from rank 0.
        get_rank: returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call each of ``callbacks`` after ranks have been lost: to change a learning rate, for instance."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Do what is due after ranks have been lost."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that the hosts of the job have changed at ``timestamp``; the next :meth:`commit` tells all ranks."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and begin anew if a rank has been told that hosts have changed. All ranks call this."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks, if any of them has been told that hosts have changed."""
        newest, update = self._last_updated_timestamp, NO_UPDATE
        while not self._host_messages.empty():
            timestamp, what = self._host_messages.get()
            if timestamp > newest:
                newest, update = timestamp, update | what
        everyones = self._gather((newest, update))
        before, self._last_updated_timestamp = self._last_updated_timestamp, max(time for time, _ in everyones)
        if self._last_updated_timestamp > before:
            all_updates = NO_UPDATE
            for _, what in everyones:
                all_updates |= what
            raise HostsUpdatedInterrupt(all_updates == REMOVED)

    def _gather(self, mine: tuple[float, int]) -> list[tuple[float, int]]:
        return [self._bcast_object(mine)]

    def save(self) -> None:
        """Keep the state as it is, to go back to."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what :meth:`save` has kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state of all ranks that of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do what is due once other ranks have met, before :meth:`sync`."""


class ObjectState(State):
    """State of objects that are attributes of it: whatever ``broadcast_object`` can send.

    Args:
        bcast_object, get_rank: as of :class:`State`.
        kwargs: the attributes and their first values.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()

    def save(self) -> None:
        """Keep copies of the attributes."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to what was kept."""
        self._set_attributes()

    def sync(self) -> None:
        """Set the attributes to those of rank 0, as it has kept them."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


class StateHandler:
    """Handler of one value whose state is more than itself: a model, an optimizer, a sampler."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of its state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load what was kept."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Make it equal to that of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do what is due once other ranks have met."""

    def set_value(self, value: Any) -> None:
        """Handle ``value`` from now on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Handler of a module."""

    def sync(self) -> None:
        """Broadcast parameters and buffers."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Handler of an optimizer."""

    def sync(self) -> None:
        """Broadcast state and hyperparameters."""
        broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        """Let a ``DistributedOptimizer`` reduce its gradients over the ranks that there are now."""
        control = control_of(self.value)
        if control is not None and control.has_ended:
            control.begin(self.value)


class SamplerStateHandler(StateHandler):
    """Handler of an :class:`ElasticSampler`."""

    def sync(self) -> None:
        """Broadcast how far it is."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def reset(self) -> None:
        """Deal out what is left anew."""
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return which handler is for which type; the first that fits is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Set which handler is for which type."""
    _registry[:] = registry


class TorchState(ObjectState):
    """State of training: models, optimizers, samplers, and plain values.

    Args:
        model: a module, or ``None``.
        optimizer: an optimizer, or ``None``; wrapped by ``DistributedOptimizer`` or not.
        kwargs: further attributes: more of these, samplers, and whatever ``broadcast_object`` can send.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        handlers, rest = {}, {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            handler = _handler_of(value)
            if handler is None:
                rest[name] = value
            else:
                handlers[name] = handler
        self._handlers: dict[str, StateHandler]
        vars(self)["_handlers"] = handlers
        for name, handler in handlers.items():
            vars(self)[name] = handler.value
        super().__init__(broadcast_object, rank, **rest)

    def save(self) -> None:
        """Keep copies of everything."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was kept."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Make everything equal to rank 0's, and keep it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        self.save()

    def reset(self) -> None:
        """Let optimizers and samplers know of the ranks that there are now."""
        for handler in self._handlers.values():
            handler.reset()

    def _gather(self, mine: tuple[float, int]) -> list[tuple[float, int]]:
        return allgather_object(mine)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


def _handler_of(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
