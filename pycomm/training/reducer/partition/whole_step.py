"""WholeStep: a sharded step of any optimizer, in which each rank steps whole parameters by the optimizer's own code.

Optimizers that orthogonalise or precondition matrices (Muon, SOAP, Shampoo) cannot step a part of one. So each rank
owns whole parameters: it gets the average of their gradients, keeps their state, and steps them alone; then all ranks
get the new values (Rajbhandari et al., ZeRO, 2020, section 5.1, by parameters in place of equal parts).

An optimizer may do so if it steps each parameter by that one's gradient and state alone: see :mod:`independent`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from pycomm.agreement import exchanged
from pycomm.collectives.broadcasting import broadcast_tensors, decode, encode
from pycomm.collectives.communicator import Communicator
from pycomm.errors import CommError, attempt
from pycomm.optim.masters import WholeMasters
from pycomm.optim.parameters import gradients_of, optimizer_parameters
from pycomm.optim.partition import Partition
from pycomm.optim.pending_factor import FactorStep, refuse_closure
from pycomm.optim.step_override import Factor, own_step
from pycomm.training.reducer.buckets import SentBucket
from pycomm.training.reducer.partition.spans import SpanTable

_LOG = logging.getLogger("pycomm")


class OwnSteps(FactorStep):
    """Override for parameters that the optimizer steps as they are; its interface is that of WholeMasters, too."""

    _take: Callable[[Factor, bool], None] | None = None

    def run(self, closure: Callable[[], Any] | None) -> Any:
        refuse_closure(closure)
        assert self._take is not None
        self._take(self._pending.take(), False)

    def take_together(self, take: Callable[[Factor, bool], None] | None) -> None:
        """Call ``take`` with the factor of the gradients, and whether the step is to be skipped, from now on."""
        self._take = take

    @contextlib.contextmanager
    def stepped(self, factor: Factor) -> Iterator[None]:
        """Return a context for the optimizer's own step, in which the gradients are multiplied by ``factor``."""
        grads = gradients_of(self.optimizer)
        if grads and not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_(grads, factor)
        yield

    def entry_of(self, param: torch.Tensor) -> dict[str, Any]:
        """Return the state of ``param``, with its master if there is one."""
        entry: dict[str, Any] = self.optimizer.state.get(param, {})
        return entry

    def keep_only(self, is_kept: Callable[[torch.Tensor], bool]) -> None:
        """Keep only masters for which the function returns true."""

    def add_entries(self, entries: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Add such state of more parameters."""
        self.optimizer.state.update(entries)


class WholeStep:
    """Step of ``optimizer`` by its own class, on each rank for the parameters that it owns.

    Attributes:
        is_divided: whether a step has been divided: this rank then has the state of its own parameters only.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        stepping: OwnSteps | WholeMasters,
        spans: SpanTable,
        communicator: Communicator,
    ) -> None:
        self.optimizer, self._stepping, self._communicator = optimizer, stepping, communicator
        self._partition: Partition | None = None
        self._places: dict[torch.Tensor, torch.Tensor] = {}
        self._spans, self.is_divided = spans, False
        self._hook = optimizer.register_state_dict_post_hook(self._complete)
        self._methods = {name: getattr(optimizer, name, None) for name in ("train", "eval")}  # of schedule-free ones

    def note_places(self, buckets: Iterable[SentBucket]) -> None:
        """Note where the parameters of ``buckets`` lie from now on, in memory that others read or get values from."""
        self._places.update({slot.param: slot.param.detach() for sent in buckets for slot in sent.slots})
        if self.is_divided:  # new parameters have owners now
            self._stepping.keep_only(self._spans.is_own)

    # Steps.

    def take(self, factor: Factor, is_skipped: bool) -> None:
        """Take a step with gradients times ``factor``, unless it is skipped. Collective."""
        assert self._partition is not None
        with self._partition.step(self.optimizer, factor, is_skipped=is_skipped) as is_taken:
            if is_taken:
                self._step_own(factor)

    def _step_own(self, factor: Factor) -> None:
        """Step this rank's own parameters."""
        if not self.is_divided:
            self.is_divided = True
            self._stepping.keep_only(self._spans.is_own)
        state, others = self.optimizer.state, [(param, param.grad) for param in self._spans.others()]
        for param, _ in others:
            state.pop(param, None)  # from before attach, or a checkpoint
            param.grad = None
        try:
            with self._stepping.stepped(factor):
                own_step(self.optimizer, None)
        finally:
            for param, grad in others:
                param.grad = grad
        self._bring_back()

    def _bring_back(self) -> None:
        """Copy parameters that the optimizer has replaced (``param.data = ...``) to their places."""
        for param in self._spans.own():
            place = self._places.get(param)
            if place is not None and param.data_ptr() != place.data_ptr():
                place.copy_(param.detach())
                param.data = place

    # As the steps by kernels.

    def share(self, partition: Partition) -> None:
        """Take later steps in the context of ``partition``."""
        self._partition = partition
        self._stepping.take_together(self.take)
        for name, method in self._methods.items():
            if callable(method):
                vars(self.optimizer)[name] = functools.partial(self.call, method)

    def take_whole(self, completed: object) -> None:
        """State has been gathered by :meth:`step_alone`."""

    def detach(self) -> None:
        self._stepping.detach()

    def step_alone(self) -> None:
        """Gather the state, and step all parameters on this rank from now on. Collective."""
        self._partition = None
        self._stepping.take_together(None)
        self._stepping.keep_only(lambda _: True)
        self._hook.remove()
        for name in self._methods:
            if isinstance(vars(self.optimizer).get(name), functools.partial):
                del vars(self.optimizer)[name]
        if not self.is_divided:
            return
        self.is_divided = False
        try:
            params = list(optimizer_parameters(self.optimizer))
            self._stepping.add_entries({params[index]: entry for index, entry in self._others_states().items()})
        except (CommError, ValueError) as error:
            _LOG.warning(
                "the optimizer's state was kept by its owners, and that of other ranks is lost (%s): it begins anew; "
                "load a checkpoint",
                error,
            )

    def call(self, method: Callable[[], Any]) -> Any:
        """Call ``method`` of the optimizer, which changes its parameters; all ranks get the new values. Collective."""
        if self._partition is None or not self.is_divided:
            return method()
        groups, own = self.optimizer.param_groups, set(self._spans.own())
        whole = [group["params"] for group in groups]
        self._communicator.barrier()  # until all have read the old ones
        with self._partition.writing(self.optimizer):
            try:
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = [param for param in params if param in own]
                result = method()
            finally:
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = params
            self._bring_back()
        return result

    # State.

    def _others_states(self) -> dict[int, dict[str, Any]]:
        """Return the state of other ranks' parameters, in new memory, by index. Collective.

        Raises:
            ValueError: on every rank: an owner has state that cannot be sent.
        """
        params, rank = list(optimizer_parameters(self.optimizer)), self._communicator.rank
        gather = self._communicator.channel.all_gather_bytes
        sent: list[torch.Tensor] = []

        def encoded() -> list[Any]:
            mine = set(self._spans.own())
            own = [(index, self._stepping.entry_of(param)) for index, param in enumerate(params) if param in mine]
            return [[index, encoded_state(entry, sent)] for index, entry in own if entry != {}]

        everyones = exchanged(gather, attempt(encoded), "gather the optimizer's state")
        found: dict[int, dict[str, Any]] = {}
        for source, nodes in enumerate(everyones):
            tensors = sent if source == rank else []
            if source != rank:
                found.update((index, decode(node, {}, params[index], tensors)) for index, node in nodes)
            broadcast_tensors(self._communicator, tensors, source)
        return found

    def _complete(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the state of other ranks' parameters. Collective."""
        if self.is_divided:
            state_dict["state"].update(self._others_states())


def encoded_state(entry: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state ``entry`` of a parameter, encoded for other ranks; its tensors are appended to ``tensors``."""
    if not isinstance(entry, dict):
        raise ValueError(f"its state of a parameter is a {type(entry).__name__}, wanted a dict")
    for key, value in entry.items():
        if '["own",' in json.dumps(encode(value, []), separators=(",", ":")):
            raise ValueError(f"its state {key!r} of a parameter has a {type(value).__name__}, which cannot be sent")
    return encode(dict(entry), tensors)
