"""WholeStep: a sharded step of any optimizer, in which each rank steps whole parameters by the optimizer's own code.

Optimizers that orthogonalise or precondition matrices (Muon, SOAP, Shampoo) cannot step a part of one. So each rank
owns whole parameters: it gets the average of their gradients, keeps their state, and steps them alone; then all ranks
get the new values (Rajbhandari et al., ZeRO, 2020, section 5.1, by parameters in place of equal parts).

The first steps are a trial. All ranks step all parameters, as without sharding, and each also steps its own ones on a
copy of the optimizer. If they differ, the optimizer makes parameters depend on one another, and the step raises. After
the trial, rank 0 times the copy on a parameter of each shape, and parameters are dealt to ranks by these times.
Parameters that come later are tried, too: each rank steps copies of its own ones with and without the gradients of the
new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from pycomm.agreement import exchanged
from pycomm.collectives.broadcasting import broadcast_tensors, decode
from pycomm.collectives.communicator import Communicator
from pycomm.errors import CommError, attempt
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.pending_factor import FactorStep, refuse_closure
from pycomm.optim.step_override import Factor, own_step
from pycomm.training.reducer.buckets import BucketInFlight
from pycomm.training.reducer.partition.owners import Owners, prior_costs
from pycomm.training.reducer.partition.trial import StepTrial, costs_of, encoded_state

_LOG = logging.getLogger("pycomm")


class SteppingRanks(Protocol):
    """Ranks that step together; see :class:`pycomm.training.reducer.partition.StepPartition`."""

    def step(
        self, optimizer: torch.optim.Optimizer, *, is_skipped: bool, needs_gradients: bool
    ) -> AbstractContextManager[bool]: ...
    def writing(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]: ...


class WholeStep(FactorStep):
    """Step of ``optimizer`` by its own class, on each rank for the parameters that it owns.

    Args:
        optimizer: the optimizer.
        communicator: the ranks.

    Attributes:
        on_trial: whether all ranks step all parameters.
        is_dealt: whether the buckets are sorted by the parameters' owners.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, communicator: Communicator) -> None:
        super().__init__(optimizer)
        self._communicator = communicator
        self._partition: SteppingRanks | None = None
        self._places: dict[torch.Tensor, torch.Tensor] = {}
        self.owners = Owners(optimizer, communicator.rank, communicator.size)
        self._trial = StepTrial(optimizer, self.owners.own()) if communicator.size > 1 else None
        self.on_trial, self.is_dealt = self._trial is not None, False
        self._newcomers: list[torch.Tensor] = []  # that came after the trial, and are being tried
        self._hook = optimizer.register_state_dict_post_hook(self._complete)
        self._methods = {name: getattr(optimizer, name, None) for name in ("train", "eval")}  # of schedule-free ones

    def settle(self, flights: Iterable[BucketInFlight]) -> None:
        """Note where the parameters of ``flights`` lie from now on, in memory that others read or get values from."""
        places = {slot.param: slot.param.detach() for flight in flights for slot in flight.slots}
        if self.is_dealt and self._communicator.size > 1 and not places.keys() <= self._places.keys():
            self._newcomers += [param for param in places if param not in self._places]
            self._trial = StepTrial(self.optimizer, self.owners.own(), self._newcomers)
        self.is_dealt = True
        self._places.update(places)

    # Steps.

    def run(self, closure: Callable[[], Any] | None) -> Any:
        refuse_closure(closure)
        assert self._partition is not None
        factor = self._pending.take()
        if self._newcomers:
            self._try_newcomers(factor)
        with self._partition.step(self.optimizer, is_skipped=False, needs_gradients=False) as is_taken:
            if not is_taken:
                return None
            self._apply(factor)
            if self.on_trial:
                self._try()
            else:
                self._step_own()
        if self._newcomers:
            self._count_newcomers()
        return None

    def _apply(self, factor: Factor) -> None:
        """Multiply the gradients by ``factor``: of others' parameters, too, as long as they are stepped here."""
        params = self.owners.everyones() if self.on_trial else self.owners.own()
        grads = [param.grad for param in params if param.grad is not None]
        if grads and not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_(grads, factor)

    def _step_own(self) -> None:
        state, others = self.optimizer.state, [(param, param.grad) for param in self.owners.others()]
        for param, _ in others:
            state.pop(param, None)  # from the trial, or a checkpoint
            param.grad = None
        try:
            own_step(self.optimizer, None)
        finally:
            for param, grad in others:
                param.grad = grad
        self._bring_back()

    def _bring_back(self) -> None:
        """Copy parameters that the optimizer has replaced (``param.data = ...``) to their places."""
        for param in self.owners.own():
            place = self._places.get(param)
            if place is not None and param.data_ptr() != place.data_ptr():
                place.copy_(param.detach())
                param.data = place

    def _try(self) -> None:
        """Take a step of the trial; deal the parameters after the last one. Collective.

        Raises:
            ValueError: on every rank: the optimizer does not step parameters one by one, or a rank's step has failed.
            Exception: this rank's step has raised it.
        """
        trial = self._trial
        assert trial is not None
        tried = attempt(trial.before_step)
        stepped = attempt(lambda: own_step(self.optimizer, None))
        failed = [each for each in (stepped, tried) if isinstance(each, Exception)]
        outcome = failed[0] if failed else attempt(trial.after_step)
        if trial.count(self._exchanged(outcome)):
            return
        costs = attempt(lambda: costs_of(trial, prior_costs(self.optimizer)) if self._communicator.rank == 0 else [])
        gather = self._communicator.channel.all_gather_bytes
        self.owners.deal(exchanged(gather, costs, "measure the cost of steps")[0])
        self._trial, self.on_trial = None, False
        if self._communicator.rank == 0:
            self.owners.warn_if_uneven()

    def _exchanged(self, outcome: Any) -> list[Any]:
        """Return all ranks' ``outcome`` of a trial's step; raise ValueError if one has failed. Collective."""
        words = f"step its own parameters alone, as shard= requires of {type(self.optimizer).__name__}"
        return exchanged(self._communicator.channel.all_gather_bytes, outcome, words)

    def _try_newcomers(self, factor: Factor) -> None:
        """Try a step with parameters that came after the trial, before any rank takes it. Collective.

        Raises:
            ValueError: on every rank: the optimizer does not step them one by one.
        """
        trial = self._trial
        assert trial is not None
        self._exchanged(attempt(lambda: trial.before_step(factor)))

    def _count_newcomers(self) -> None:
        trial = self._trial
        assert trial is not None
        if not trial.count(self._exchanged(attempt(trial.after_step))):
            self._newcomers, self._trial = [], None

    # As the steps by kernels.

    def share(self, partition: SteppingRanks) -> None:
        """Take later steps in the context of ``partition``."""
        self._partition = partition
        for name, method in self._methods.items():
            if callable(method):
                vars(self.optimizer)[name] = _Shared(method, self)

    def move_home(self, params: Iterable[torch.Tensor]) -> None:
        """State stays in this rank's own memory."""

    def take_whole(self, completed: object) -> None:
        """State has been gathered by :meth:`step_alone`."""

    def step_alone(self) -> None:
        """Gather the state, and step all parameters on this rank from now on. Collective."""
        self._partition = None
        self._hook.remove()
        for name in self._methods:
            if isinstance(vars(self.optimizer).get(name), _Shared):
                del vars(self.optimizer)[name]
        if not self.is_dealt:
            return
        self.is_dealt = False
        try:
            params = list(optimizer_parameters(self.optimizer))
            self.optimizer.state.update({params[index]: entry for index, entry in self._others_states().items()})
        except (CommError, ValueError) as error:
            _LOG.warning(
                "the optimizer's state was kept by its owners, and that of other ranks is lost (%s): it begins anew; "
                "load a checkpoint",
                error,
            )

    def call(self, method: Callable[[], Any]) -> Any:
        """Call ``method`` of the optimizer, which changes its parameters; all ranks get the new values. Collective."""
        if self._partition is None or not self.is_dealt:
            return method()
        groups, own = self.optimizer.param_groups, set(self.owners.own())
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
        state, gather = self.optimizer.state, self._communicator.channel.all_gather_bytes
        sent: list[torch.Tensor] = []

        def encoded() -> list[Any]:
            mine = set(self.owners.own())
            own = [i for i, p in enumerate(params) if p in mine and state.get(p)]
            return [[index, encoded_state(self.optimizer, params[index], sent)] for index in own]

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
        if self.is_dealt:
            state_dict["state"].update(self._others_states())


class _Shared:
    """Method of an optimizer that changes its parameters, not only in steps. Collective."""

    def __init__(self, method: Callable[[], Any], stepper: WholeStep) -> None:
        self._method, self._stepper = method, stepper

    def __call__(self) -> Any:
        return self._stepper.call(self._method)
