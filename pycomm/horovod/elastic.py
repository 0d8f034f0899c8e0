"""Training that continues from the last commit when ranks are lost."""

from __future__ import annotations

import copy
import functools
import operator
import queue
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.errors import CommError
from pycomm.horovod.basics import begin_among, init, leave_world, rank, shutdown, size
from pycomm.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from pycomm.horovod.names import HorovodInternalError, HostsUpdatedInterrupt, InvalidRequestError
from pycomm.horovod.optimizer import control_of
from pycomm.horovod.process_sets import world
from pycomm.training.elastic.membership import Membership, reconvene

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "run_fn", "shutdown"]

NO_UPDATE, REMOVED, ADDED = 0, 1, 2
"""Changes of the job's hosts; their sum means both."""


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Sampler of a part of ``dataset``'s indices for each rank, which can restart in the middle of an epoch.

    Call :meth:`record_batch` after each batch and :meth:`set_epoch` at the end of each epoch, and pass the sampler to
    :class:`TorchState`: after ranks have been lost, the remaining indices are distributed again. All parts have the
    same length, so a few indices occur twice.

    Args:
        dataset: anything with a length.
        shuffle: whether the order is random: the same on all ranks, another one in every epoch.
        seed: seed of the order; equal on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number ``epoch``: nothing of it has been processed yet."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that every rank has processed a batch, number ``batch_idx``, of ``batch_size`` samples."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the progress within the epoch."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a result of :meth:`state_dict`."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the remaining indices among the present ranks."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        times = -(-self.total_size // len(left)) if left else 0
        return iter((left * times)[: self.total_size][self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


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
        """Call each of ``callbacks`` after ranks were lost: to change a learning rate, for instance."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Reset after ranks were lost, and call the callbacks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that the hosts of the job changed at ``timestamp``; the next :meth:`commit` notifies all ranks."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and restart if a rank was notified that hosts have changed. All ranks call this."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if any of them was notified that hosts have changed."""
        newest, update = self._last_updated_timestamp, NO_UPDATE
        while not self._host_messages.empty():
            timestamp, what = self._host_messages.get()
            if timestamp > newest:
                newest, update = timestamp, update | what
        everyones = self._gather((newest, update))
        before, self._last_updated_timestamp = self._last_updated_timestamp, max(time for time, _ in everyones)
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(functools.reduce(operator.or_, (what for _, what in everyones)) == REMOVED)

    def _gather(self, mine: tuple[float, int]) -> list[tuple[float, int]]:
        return [self._bcast_object(mine)]

    def save(self) -> None:
        """Keep the state for :meth:`restore`."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the state that :meth:`save` kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's state to all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for :meth:`sync` after the ranks have changed."""


class ObjectState(State):
    """State of objects that are its attributes: anything that ``broadcast_object`` can send.

    Args:
        bcast_object, get_rank: as of :class:`State`.
        kwargs: the attributes and their first values.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attributes()

    def save(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


class StateHandler:
    """Handler of one value with a state: a model, an optimizer, a sampler."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of its state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the kept copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Copy rank 0's state to all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Prepare for :meth:`sync` after the ranks have changed."""

    def set_value(self, value: Any) -> None:
        """Handle ``value`` instead."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Handler of a module."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Handler of an optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)

    def reset(self) -> None:
        control = control_of(self.value)
        if control is not None and control.has_ended:
            control.begin(self.value)


class SamplerStateHandler(StateHandler):
    """Handler of an :class:`ElasticSampler`."""

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))

    def reset(self) -> None:
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the handlers of types; the first that matches is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Set the handlers of types."""
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
            handler = next((made(value) for kind, made in _registry if isinstance(value, kind)), None)
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
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        self.save()

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def _gather(self, mine: tuple[float, int]) -> list[tuple[float, int]]:
        return allgather_object(mine)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)


class Survivors:
    """Survivors of the world: they agree on who is left, at least ``min_ranks``, and open a new world."""

    def __init__(self, min_ranks: int) -> None:
        here = world()
        self._communicator = Communicator(here.sets[0].group, here.timeout)
        self._membership = Membership.found(self._communicator, min_ranks)

    def begin_anew(self, error: Exception) -> None:
        """Leave the world, and begin another one with the ranks that are left. Collective among these."""
        rank = world().rank
        cause = _cause(error, rank, alone=len(world().sets) == 1)
        leave_world(f"it begins again: {cause}")
        reconvene(
            self._membership,
            self._communicator,
            cause,
            0,
            catch_up=lambda _: None,
            open_again=lambda: begin_among(self._communicator),
        )

    def close(self) -> None:
        """Release the communicator and membership."""
        self._communicator.close()
        self._membership.close()


def _cause(error: Exception, rank: int, alone: bool) -> CommError:
    if isinstance(error, CommError) and alone:
        return error
    return CommError.during("elastic", str(error), rank=rank)


def run(func: Callable[..., Any], min_ranks: int = 1) -> Callable[..., Any]:
    """Decorate ``func`` so that it continues when ranks are lost.

    Its first argument is a :class:`State`, which is made equal on all ranks before ``func`` begins. When an operation
    or ``backward()`` fails because a rank is lost, the others agree on who is left, return to the last ``commit()``,
    and restart ``func`` among themselves; a ``DistributedOptimizer`` in the state continues too. Mistakes
    (``InvalidRequestError``) end it, as they would recur. New ranks are not admitted.

    Args:
        func: function of a state, and any other arguments. It may not end on one rank before the others.
        min_ranks: fewest ranks that continue.

    Raises:
        CommError: from the decorated function: fewer than ``min_ranks`` are left, or this rank was excluded.
        ValueError: it is called before ``init()``.
    """
    if not isinstance(min_ranks, int) or min_ranks < 1:
        raise ValueError(f"min_ranks is {min_ranks!r}, wanted an integer from 1")

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        survivors = Survivors(min_ranks)
        try:
            return _loop(functools.partial(func, state, *args, **kwargs), state, survivors.begin_anew)
        finally:
            survivors.close()

    return wrapper


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Decorate ``func`` so that it calls ``reset`` and restarts when ranks are lost; see :func:`run`."""

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        return _loop(functools.partial(func, state, *args, **kwargs), state, lambda _: reset())

    return wrapper


def _loop(body: Callable[[], Any], state: State, begin_anew: Callable[[Exception], None]) -> Any:
    skips_sync = False
    failure: Exception | None = None
    while True:
        if failure is not None:
            begin_anew(failure)  # its errors are final
        try:
            if failure is not None:
                state.on_reset()
            if not skips_sync:
                state.sync()
            return body()
        except InvalidRequestError:
            raise
        except HostsUpdatedInterrupt as interrupt:
            skips_sync, failure = interrupt.skip_sync, interrupt
        except (HorovodInternalError, CommError) as error:
            state.restore()
            skips_sync, failure = False, error
