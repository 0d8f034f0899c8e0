"""SpreadPartition: a sharded step between ranks on several hosts, or on GPUs.

If P hosts average n gradients and each steps all parameters, each sends 2 (P - 1) / P n elements before the step. Here
each sends (P - 1) / P n before the step, and as many after it: the new parameters of its part. These travel during the next forward, which waits only for the parameters that
it uses. Each rank keeps the optimizer state of its own part (ZeRO, Rajbhandari et al., 2020, section 5.1).

Until a parameter has arrived, it has the class :class:`_Arriving`, so that every torch operation on it waits first. On
GPUs the host does not wait, but torch's current stream. Parameters have that class until the next backward there, as
another stream may use them later.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from pycomm.collectives.channel import Channel
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import view_like
from pycomm.collectives.transport.gpu import GpuWork
from pycomm.collectives.transport.rendezvous import order_of
from pycomm.errors import CommError
from pycomm.optim.module_hooks import BeforeForward
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.step_override import Factor
from pycomm.torch_internals import (
    has_compiled,
    has_scripted,
    prepare_graphs,
    prepare_scripts,
    prepare_transforms,
    without_torch_function,
)
from pycomm.training.reducer.buckets import BucketInFlight
from pycomm.training.reducer.partition.partition import GpuMemory, Memory, Segment, StepPartition, begins_of
from pycomm.training.reducer.replica_differences import DamageError
from pycomm.training.reducer.settings import AttachSettings
from pycomm.worker import Work

_arrivals: dict[int, Arrival] = {}
"""By id of the parameter, as its attributes would be saved with it."""

_Tensor: Any = torch.Tensor
_HARMLESS = {
    *(_Tensor.grad.__get__, _Tensor.grad.__set__, _Tensor.requires_grad.__get__, _Tensor.is_leaf.__get__),
    *(_Tensor.shape.__get__, _Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.numel),
}
"""Operations that do not read values, and are called between a step and the next forward (``zero_grad()``)."""


class _Arriving(torch.nn.Parameter):
    """Parameter whose values may not have arrived: its use waits."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_torch_function() if func in _HARMLESS else _arrived([args, kwargs]):
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        with _arrived(self):
            return self.__deepcopy__(memo)  # now that of the ordinary class

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _arrived(self):
            return self.__reduce_ex__(protocol)


@contextlib.contextmanager
def _arrived(found: Any) -> Iterator[None]:
    """Wait for all parameters in nested sequences and dicts; they are ordinary ones inside the context."""
    params: list[Any] = list(_arriving_in(found))
    for param in params:
        if (arrival := _arrivals.get(id(param))) is not None:
            arrival.use()
    for param in params:
        param.__class__ = torch.nn.Parameter
    try:
        yield
    finally:
        for param in params:
            if id(param) in _arrivals:
                param.__class__ = _Arriving


def _arriving_in(found: Any) -> Iterator[_Arriving]:
    if isinstance(found, _Arriving):
        yield found
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from _arriving_in(item)
    elif isinstance(found, dict):
        for item in found.values():
            yield from _arriving_in(item)


def _use(found: Any) -> None:
    with _arrived(found):
        pass


def _use_module(module: torch.nn.Module) -> None:
    _use(list(module.parameters(recurse=False)))


def _await_module(module: torch.nn.Module) -> None:
    for param in module.parameters(recurse=False):
        if (arrival := _arrivals.get(id(param))) is not None:
            arrival.wait()


def _await_all() -> None:
    for arrival in set(_arrivals.values()):
        arrival.wait()


prepare_scripts(_await_module)


class Arrival:
    """Parameters that arrive together, when ``work`` is done.

    Args:
        failed: called with the error if the operation fails, before a method raises it.
        current_stream: returns torch's current stream, if the parameters are on a GPU.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        work: Work | GpuWork,
        failed: Callable[[BaseException], None],
        current_stream: Callable[[], int] | None = None,
    ) -> None:
        self._params, self._work, self._failed = list(params), work, failed
        self._current_stream, self._streams = current_stream, set[int]()  # those that wait already
        for param in self._params:
            _arrivals[id(param)] = self
            param.__class__ = _Arriving

    def use(self) -> None:
        """Let this thread wait for the parameters, and make them ordinary ones; or the current stream of a GPU."""
        if self._current_stream is None:
            self.wait()
        elif (stream := self._current_stream()) not in self._streams:
            self._wait()
            self._streams.add(stream)

    def wait(self) -> None:
        """Wait likewise, and make them ordinary ones in any case."""
        if not self._params:
            return
        try:
            self._wait() if self._current_stream is None else self.use()
        finally:
            self._make_ordinary()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:
            self._failed(error)
            raise

    def abandon(self) -> None:
        """Wait until nothing writes to the parameters, and make them ordinary ones as they are."""
        self._work.ends_within(None)
        self._make_ordinary()

    def _make_ordinary(self) -> None:
        for param in self._params:
            param.__class__ = torch.nn.Parameter
            _arrivals.pop(id(param), None)
        self._params.clear()


class ParameterArrivals:
    """Arrivals between one step and the next backward, and the hooks of modules that wait for them.

    Args:
        module: the attached module; without one, nothing says what the next forward uses first.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        prepare_transforms(_use)
        prepare_graphs(_await_all)
        self._module = module
        self._open: list[Arrival] = []
        self._hooks: dict[torch.nn.Module, Any] = {}
        if module is not None:
            self._hooks[module] = module.register_forward_pre_hook(BeforeForward(self._before_root))

    def expect(self, params: Iterable[torch.Tensor]) -> None:
        """Make the modules that own ``params`` wait for them before their forward.

        This serves extensions that get a parameter by ``torch.autograd.Function``, which torch does not intercept.
        """
        if self._module is None:
            return
        wanted = {id(param) for param in params}
        for module in self._module.modules():
            own = [p for p in module.parameters(recurse=False) if id(p) in wanted]
            if own and module not in self._hooks:
                hook = BeforeForward(functools.partial(_use_module, module))
                self._hooks[module] = module.register_forward_pre_hook(hook)

    def may_come_late(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether all readers of ``params`` can be made to wait, unlike compiled code and TorchScript."""
        if self._module is None or has_compiled() or has_scripted():
            return False
        if any(isinstance(module, torch.jit.ScriptModule) for module in self._module.modules()):
            return False
        return all(type(param) is torch.nn.Parameter for param in params)

    def begin(
        self, flight: BucketInFlight, exchange: Callable[[], None], failed: Callable[[BaseException], None]
    ) -> None:
        """Begin to send the new parameters of ``flight`` by ``exchange``.

        If they may not come late, wait for them here. ``failed``: see :class:`Arrival`.
        """
        channel, bucket = flight.communicator.channel, flight.bucket

        def gather() -> None:
            # The ranks have agreed on the step.
            with contextlib.nullcontext() if bucket.on_gpu else channel.skip_checks():
                exchange()

        work: Work | GpuWork
        work = channel.submit_on_gpu(bucket.device, gather, (), ()) if bucket.on_gpu else channel.submit(gather)
        params: Any = [slot.param for slot in flight.slots if slot.param.numel() > 0]
        if self.may_come_late(params):
            current_stream = Channel.current_stream_of(bucket.device) if bucket.on_gpu else None
            self._open.append(Arrival(params, work, failed, current_stream))
        else:
            work.wait()

    def wait(self) -> None:
        """Wait for all, in the order in which they began; raise the first error."""
        for arrival in self._taken():
            arrival.wait()

    def abandon(self) -> None:
        """Make all parameters ordinary ones as they are, since one bucket has not arrived."""
        for arrival in self._taken():
            arrival.abandon()

    def _taken(self) -> Iterator[Arrival]:
        while self._open:
            yield self._open.pop(0)

    def _before_root(self) -> None:
        assert self._module is not None
        if not self._module.training:
            self.wait()  # torch's fast paths of evaluation check the class

    def close(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()


_LOG = logging.getLogger("pycomm")

States = dict[int, dict[str, torch.Tensor]]
"""Whole state of parameters, by their ids, then by key."""


class SpreadSegment(Segment):
    """Segment of ranks that reach each other by messages.

    State is laid out as that of all ranks, but only this rank's part is ever touched, so that only that takes memory.
    """

    def mirrors_of(self, index: int) -> list[torch.Tensor]:
        return []

    def _zeros(self, num_bytes: int) -> Memory:
        return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def gather(self, channel: Channel) -> None:
        """Overwrite each part of the parameters with that of its rank. Collective."""
        parts = self.parts_in(self.own, self.dtype)
        channel.all_gather_v(parts, parts[self._rank])

    def whole_states(self, flight: BucketInFlight) -> States:
        """Return all state of the parameters of ``flight``, gathered in new memory. Collective."""
        found: States = {id(slot.param): {} for slot in flight.slots}
        for key, dtype in sorted(self._states, key=str):  # in an order that is the same on all ranks
            whole = torch.empty(self.num_elements, dtype=dtype)
            mine = self.parts_in(self._states[key, dtype], dtype)[self._rank]
            flight.communicator.channel.all_gather_v([whole[share] for share in self.shares], mine)
            for slot, part in zip(flight.slots, torch.split(whole, flight.bucket.numels), strict=True):
                found[id(slot.param)][key] = view_like(part.clone(), slot.param)
        return found


_GPU_ALIGNMENT = 256
"""Alignment of parameters on GPUs in bytes. Matrix products are slow, or kernels fail, where it is less than 16."""


class SpreadPartition(StepPartition):
    """Partition over ranks that reach each other by messages; on GPUs it is by whole parameters."""

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module | None,
        settings: AttachSettings,
        on_gpu: bool = False,
    ) -> None:
        self._optimizer, self._on_gpu = optimizer, on_gpu
        self._segments: dict[BucketInFlight, SpreadSegment] = {}
        self._at_home: set[torch.Tensor] = set()  # parameters whose masters are kept by parts
        self._arrivals, self._is_lost = ParameterArrivals(module), False
        order = order_of(communicator.channel.transport.hosts)
        super().__init__(communicator, optimizer, module, settings, order, on_gpu)
        self._hook = self._optimizer.register_state_dict_post_hook(self._complete)

    def _adopt(self, flights: Sequence[BucketInFlight]) -> None:
        rank = self._communicator.rank
        for flight in flights:
            bucket, params = flight.bucket, [slot.param for slot in flight.slots]
            shares = self._shares_of(bucket, flight.slots)
            alignment = _GPU_ALIGNMENT // bucket.dtype.itemsize if self._on_gpu else 1
            num_bytes = begins_of(bucket.numels, alignment)[-1] * bucket.dtype.itemsize
            room = self._communicator.empty(num_bytes, torch.uint8, bucket.device)
            own = GpuMemory(room, 0, num_bytes) if room.is_cuda else room.numpy()
            segment = self._segments[flight] = SpreadSegment(bucket, params, shares, rank, own, alignment)
            self._settle_in(flight, segment)
            self._arrivals.expect(params)

    def await_parameters(self) -> None:
        self._arrivals.wait()

    def reduction_failed(self, error: BaseException) -> None:
        # A stream waits for parameters, not the host, which finds out later that they have not arrived.
        if self._on_gpu and isinstance(error, CommError) and not isinstance(error, DamageError):
            self._lost(self._optimizer, error)

    # Steps.

    def _agree(self, factor: Factor, is_skipped: bool) -> bool:
        is_taken = super()._agree(factor, is_skipped)
        if is_taken:
            new = self._places.keys() - self._at_home
            self._stepper.move_home([param for param in self._places if param in new])
            self._at_home |= new
        return is_taken

    def _lost(self, optimizer: torch.optim.Optimizer, error: BaseException) -> None:
        if not self._is_lost:
            self._is_lost = True
            super()._lost(optimizer, error)
            self._arrivals.abandon()
            torch.optim.Optimizer.zero_grad(optimizer)  # else step() would first say that gradients are used

    def _hand_out(self) -> None:
        lost = functools.partial(self._lost, self._optimizer)
        # The last bucket has the first layers.
        for flight in reversed(self._flights):
            gather = functools.partial(self._segments[flight].gather, flight.communicator.channel)
            self._arrivals.begin(flight, gather, lost)

    def _is_complete(self) -> bool:
        return False

    # State.

    def _whole_states(self) -> States:
        """Return all state that is kept by parts, gathered in new memory, by parameter. Collective."""
        return {p: s for flight, segment in self._segments.items() for p, s in segment.whole_states(flight).items()}

    def _completed(self, entry: dict[str, Any], param: torch.Tensor, whole: States) -> dict[str, Any]:
        """Return the state ``entry`` of ``param`` with whole tensors in place of parts."""
        if param not in self._places:
            return entry
        segment, index = self._places[param]
        parts = [k for k, v in entry.items() if isinstance(v, torch.Tensor) and segment.is_home(index, k, v)]
        return {**entry, **{key: whole[id(param)][key] for key in parts}}

    def _complete(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Replace parts by whole tensors. Collective."""
        whole, states = self._whole_states(), state_dict["state"]
        for index, param in enumerate(optimizer_parameters(optimizer)):
            if index in states:
                states[index] = self._completed(states[index], param, whole)

    def move_out(self) -> None:
        """Move parameters and whole state to this rank's own memory, and let it step alone. Collective."""
        self._hook.remove()
        self._arrivals.close()
        try:
            self.await_parameters()
            whole = self._whole_states()
            self._stepper.take_whole(lambda entry, param: self._completed(entry, param, whole))
        except (CommError, ValueError) as error:
            _LOG.warning(
                "the optimizer's state was kept by parts on all ranks, and those of others are lost (%s): it begins "
                "anew; load a checkpoint",
                error,
            )
            self._stepper.take_whole(None)
        super().move_out()
        self._segments.clear()
        self._at_home.clear()
