"""Training loop of a rank that averages less often: checks of its parameters, and of batches that it left out."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pycomm.collectives.layout import Kinds
from pycomm.optim.attached import forget_averaged, register_averaged
from pycomm.optim.guard import StepWatch, is_around
from pycomm.optim.hyperparameters import Hyperparameters, first_difference
from pycomm.optim.loop_index import LoopIndex
from pycomm.optim.module_hooks import BeforeForward, ForwardWatch, ZeroGradHook, hook_forward, watch_copies, weakly
from pycomm.optim.parameters import Writes, optimizer_parameters
from pycomm.optim.skips import listen_to_skips, stop_listening
from pycomm.torch_internals import Places, current_graph_task, move_hook, own_parameters, parts_of
from pycomm.training.reducer import Ignored
from pycomm.training.reductions.fields import FieldWords, GroupsRead, Source
from pycomm.training.reductions.record import Record

_ATTACH = "detach(), and call {} again with the module and the optimizer that are trained now"
_MOST_WRITES = 8
"""Most changes of the parameters between two steps: SAM and Reptile make some on purpose."""


class TrackedParameters:
    """Parameters of one module and one optimizer that ranks average.

    Args:
        named: the parameters by name.
        what: name of the public function that averages them, for errors.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], what: str
    ) -> None:
        self.model, self.optimizer, self.named, self.what = model, optimizer, dict(named), what
        self.advice = _ATTACH.format(what)
        self._own = {id(p) for p in named.values()}
        self._kinds = Kinds(list(named), list(named.values()))
        self._places = Places(map(own_parameters, parts_of(model)))
        self._groups = [list(group["params"]) for group in optimizer.param_groups]

    def knows(self, param: torch.Tensor) -> bool:
        return id(param) in self._own

    def problem_of_optimizer(self) -> str:
        """Return what is wrong with the parameters in the optimizer's groups; "" if nothing is."""
        if change := self._kinds.change():
            return f"{change}. {self.advice}"
        groups = [group["params"] for group in self.optimizer.param_groups]
        same_sizes = list(map(len, groups)) == list(map(len, self._groups))
        if same_sizes and all(map(operator.is_, itertools.chain(*groups), itertools.chain(*self._groups))):
            return ""
        held = {id(p) for group in groups for p in group}
        known = self._own | {id(p) for group in self._groups for p in group}
        new = [p for group in groups for p in group if id(p) not in known]
        if new:
            what = f"the optimizer has {len(new)} parameters that are not averaged, the first of shape"
            return f"{what} {list(new[0].shape)}: they were added since. {self.advice}"
        lost = [name for name, p in self.named.items() if id(p) not in held]
        if lost:
            return f"parameter {lost[0]!r} is averaged, and no longer in the optimizer. {self.advice}"
        self._groups = [list(group) for group in groups]  # only their order has changed
        return ""

    def problem_of_other(self, optimizer: torch.optim.Optimizer) -> str:
        """Return that another ``optimizer`` is about to step one of the parameters; "" if it is not."""
        if optimizer is self.optimizer:
            return ""
        held = set(map(id, optimizer_parameters(optimizer)))
        name = next((name for name, p in self.named.items() if id(p) in held and p.grad is not None), None)
        if name is None:
            return ""
        other, given = type(optimizer).__name__, type(self.optimizer).__name__
        return f"a {other} other than the {given} passed to {self.what} is about to step {name!r}. {self.advice}"

    def problem_at_forward(self) -> str:
        """Return what is wrong with the module's parameters; "" if nothing is. Cheap while none was replaced."""
        if self._places.are_unchanged():
            return ""
        problem = self.problem_of_model()
        if not problem:  # parametrizations and pruning have renamed some
            self._places = Places(map(own_parameters, parts_of(self.model)))
        return problem

    def problem_of_model(self) -> str:
        """Return what is wrong with the module's parameters; "" if nothing is."""
        here = dict(self.model.named_parameters())
        ids = {id(p) for p in here.values()}
        lost = [name for name, p in self.named.items() if id(p) not in ids]
        new = [name for name, p in here.items() if p.requires_grad and id(p) not in self._own]
        exchanged = next((name for name, p in self.named.items() if here.get(name, p) is not p), None)
        if exchanged is not None:
            what = f"parameter {exchanged!r} of the module is not the parameter that is averaged"
            return f"{what}: it was replaced. {self.advice}"
        if new:
            return f"parameter {new[0]!r} of the module is trained, and not averaged: it is new. {self.advice}"
        if lost:
            return f"parameter {lost[0]!r} is averaged, and no longer in the module. {self.advice}"
        return ""

    def problem(self) -> str:
        return self.problem_of_optimizer() or self.problem_of_model()


class GroupNumbers:
    """Numbers of the optimizer's groups that must be the same on all ranks.

    Numbers that the optimizer itself changes (the ``d`` of Prodigy) are left out: they follow from gradients, which
    differ between ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, per_rank: Iterable[str]) -> None:
        self._optimizer, self._per_rank = optimizer, frozenset(per_rank)
        self._reader = Hyperparameters(optimizer, self._per_rank)
        self._before: list[dict[str, Any]] = []
        self.own: set[str] = set()

    def before_step(self) -> None:
        self._before = [_plain(group) for group in self._optimizer.param_groups]

    def after_step(self) -> None:
        """Leave out the numbers that the step has changed."""
        changed: set[str] = set()
        for before, group in zip(self._before, self._optimizer.param_groups, strict=False):
            after = _plain(group)
            if after != before:
                changed |= {key for key, value in after.items() if key in before and value != before[key]}
        if changed - self.own:
            self.own |= changed
            self._reader = Hyperparameters(self._optimizer, self._per_rank | self.own)

    def read(self) -> list[GroupsRead]:
        """Return the present numbers of the groups."""
        groups = self._reader.read()
        return [GroupsRead("", self._reader.digest, lambda: groups, frozenset(self.own))]


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if type(value) in (int, float)}


_LEFT_OUT = (
    "Ranks would average the results of different batches. A rank without a usable batch calls averager.skip_step() "
    "in place of the rest of its step. A forward that is no training step belongs in torch.no_grad(), or after "
    "model.eval()"
)


class Loop:
    """Loop of this rank, watched by hooks of the optimizer, its ``zero_grad``, the module and loss scalers.

    Args:
        tracked: the parameters, with their module and optimizer.
        per_rank: keys of groups whose numbers may differ between ranks, and names of buffers.
    """

    def __init__(self, tracked: TrackedParameters, per_rank: Ignored) -> None:
        self.per_rank = per_rank
        self.tracked, self.numbers = tracked, GroupNumbers(tracked.optimizer, per_rank.patterns)
        self._model, self._optimizer = tracked.model, tracked.optimizer
        self._index, self._in_step, self._is_excluded = LoopIndex(), False, False
        self._writes = Writes(list(tracked.named.values()))
        self._handles: list[Any] = []
        self._around_step: Sequence[Any] = ()
        self._refused: Callable[[str], None] = lambda _: None

    def watch(self, stepped: Callable[[], None], skipped: Callable[[], None], refused: Callable[[str], None]) -> None:
        """Install the hooks.

        Args:
            stepped: called after each step.
            skipped: called when a loss scaler skips a step; a bound method, held weakly.
            refused: called with the problem before this rank raises an error about its parameters.
        """

        def before(*_: object) -> None:
            self._require(self.tracked.problem_of_optimizer())
            self._in_step = True

        def after(*_: object) -> None:
            self._in_step = False
            stepped()
            self._writes.restart()

        self._refused = refused
        # The module does not keep this loop alive, which the optimizer does.
        before_forward = weakly(self._before_forward)
        self._forwards = ForwardWatch(self._model, weakly(self._forwarded), before_forward)
        self._around_step = (
            self._optimizer.register_step_pre_hook(lambda *_: self.numbers.before_step()),
            self._optimizer.register_step_post_hook(lambda *_: self.numbers.after_step()),
        )
        self._handles = [
            self._forwards,
            *self._around_step,
            self._optimizer.register_step_pre_hook(before),
            self._optimizer.register_step_post_hook(after),
            hook_forward(self._model, BeforeForward(before_forward, notes_copies=True)),
            ZeroGradHook(self._optimizer, self._zeroed),
            StepWatch(self._before_other_step),
        ]
        listen_to_skips(self._optimizer, skipped)
        register_averaged(self.tracked)

    def close(self) -> None:
        """Remove the hooks."""
        forget_averaged(self.tracked)
        for handle in self._handles:
            handle.remove()
        stop_listening(self._optimizer)

    def _before_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse the step of an optimizer that is neither the tracked one, nor around it or inside its step."""
        if not (optimizer is self._optimizer or self._in_step or is_around(optimizer, self._optimizer)):
            self._require(self.tracked.problem_of_other(optimizer))

    def _require(self, problem: str) -> None:
        if problem:
            self._refused(problem)
            raise ValueError(problem)

    def _before_forward(self) -> None:
        is_training = self._model.training and torch.is_grad_enabled() and not self._in_step
        if current_graph_task() < 0 and is_training:
            self._order_hooks()
            self._require(self.tracked.problem_at_forward() or self._problem_of_writes())

    def _problem_of_writes(self) -> str:
        """Return that something other than the optimizer steps the parameters, so that ranks would never meet."""
        number = self._writes.count()
        if number < _MOST_WRITES:
            return ""
        return (
            f"something else has changed the parameters {number} times since the last step of the optimizer whose "
            f"steps are counted, and ranks meet after its steps only: another optimizer? {self.tracked.advice}"
        )

    def _order_hooks(self) -> None:
        """Read the numbers between all other hooks: what those change is not the optimizer's own."""
        for handle, last in zip(self._around_step, (True, False), strict=True):
            move_hook(handle, last=last)

    def _zeroed(self) -> None:
        if not self._in_step:  # an optimizer may evaluate a closure any number of times
            self._order_hooks()
            self._index.num_zero_grads += 1

    def _forwarded(self, output: Any, called: str) -> None:
        if current_graph_task() < 0 and not self._in_step:
            self._index.note_forward(output, called)

    def source(self, **more: Callable[[], Any]) -> Source:
        """Return what ranks compare when they meet; ``more``: values of further fields."""
        values: dict[str, Callable[[], Any]] = {
            "problem": lambda: self.tracked.problem() or None,
            "loop": self._counts,
            "groups": self.numbers.read,
        }
        words = FieldWords(_LEFT_OUT, since="the last meeting", permitting='per_rank=("{}",)')
        return Source(values | more, module=lambda: self._model, words=words)

    def _counts(self) -> tuple[int, int, bool, int] | None:
        index = self._index
        return None if self._is_excluded else (index.num_unused, index.num_zero_grads, False, 0)

    def restart(self) -> None:
        """Count from zero: the record of a meeting has been read."""
        self._forwards.trained(self._index.has_forwards)
        self._index.restart()
        self._is_excluded = False

    def exclude_counts(self) -> None:
        """Exclude the counts since the last meeting from the next comparison."""
        self._is_excluded = True


class WorkerParameters:
    """Parameters of a parameter server's worker, checked between pull and push. A worker never steps its optimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.Tensor],
        record: Record,
    ) -> None:
        self._tracked = TrackedParameters(model, optimizer, named, "parameter_server()")
        self._record, self._met = record, record.details(record.read())
        self._reader = Hyperparameters(optimizer)
        self._watches = watch_copies(model), StepWatch(self._before_other_step)
        register_averaged(self._tracked)
        self.remember_numbers()

    def remember_numbers(self) -> None:
        """Remember the present numbers of the parameter groups as the servers' numbers."""
        self._numbers = self._reader.read()

    def _before_other_step(self, optimizer: torch.optim.Optimizer) -> None:
        if problem := self._tracked.problem_of_other(optimizer):
            raise ValueError(problem)

    def require_unchanged(self) -> None:
        """Raise ValueError if the module or the optimizer has other parameters now."""
        if problem := self._tracked.problem():
            raise ValueError(problem)

    def require_as_met(self) -> None:
        """Raise ValueError if parameters, or values that ranks compare, have changed since they met the servers."""
        self.require_unchanged()
        now = self._record.details(self._record.read())
        if now != self._met:
            self._record.explain(self._record.parsed({0: self._met, 1: now}))
        found = first_difference({0: self._numbers, 1: self._reader.read()})
        if found is not None:
            index, key, values = found
            raise ValueError(
                f"{key!r} of parameter group {index} was changed on this worker, from {values[0]!r} to {values[1]!r}, "
                "and the servers step: a schedule belongs in server.schedule(). Nothing was pushed"
            )

    def close(self) -> None:
        """Stop the checks: copies may be trained, and something else may average the parameters."""
        forget_averaged(self._tracked)
        for watch in self._watches:
            watch.remove()
