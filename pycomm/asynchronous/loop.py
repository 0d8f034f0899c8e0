"""The loop of a rank that averages less often: which parameters it trains, and what it has left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycomm.communicator import Communicator
from pycomm.descriptions import name_ranks
from pycomm.optim.attached import forget_averaged, register_averaged
from pycomm.optim.hyperparameters import Hyperparameters, Numbers, first_difference
from pycomm.optim.loop_index import LoopIndex
from pycomm.optim.module_hooks import AfterForward, BeforeForward, ZeroGradHook, forget_original, watch_copies
from pycomm.optim.skips import listen_to_skips, stop_listening
from pycomm.torch_internals import Places, current_graph_task, version_of

_ATTACH = "detach(), and call {} again with the module and the optimizer that are trained now"
_LOOKED_AT = 8
"""Number of parameters whose versions are compared, about."""
_MOST_WRITES = 8
"""Number of times that parameters may change between two steps: SAM and Reptile do that on purpose."""


class Known:
    """Parameters that ranks average, of one module and one optimizer.

    Args:
        model, optimizer: owners.
        named: the parameters that are averaged.
        what: name of the function that was given them, for errors.

    Attributes:
        what: as above.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], what: str
    ) -> None:
        self.model, self._optimizer, self.named, self.what = model, optimizer, dict(named), what
        self.advice = _ATTACH.format(what)
        self._own = {id(p) for p in named.values()}
        self._places = Places(model)
        self._groups = [list(group["params"]) for group in optimizer.param_groups]

    def knows(self, param: torch.Tensor) -> bool:
        """Return whether ``param`` is one of them."""
        return id(param) in self._own

    def problem_of_optimizer(self) -> str:
        """Return what is wrong with the parameters in the optimizer's groups; "" if nothing is."""
        groups = [group["params"] for group in self._optimizer.param_groups]
        if len(groups) == len(self._groups) and all(map(_same, groups, self._groups)):
            return ""
        held = {id(p) for group in groups for p in group}
        known = self._own | {id(p) for group in self._groups for p in group}
        new = [p for group in groups for p in group if id(p) not in known]
        if new:
            what = f"the optimizer has {len(new)} parameters that are not averaged, the first of shape"
            return f"{what} {list(new[0].shape)}: they have come since. {self.advice}"
        lost = [name for name, p in self.named.items() if id(p) not in held]
        if lost:
            return f"parameter {lost[0]!r} is averaged, and no longer in the optimizer. {self.advice}"
        self._groups = [list(group) for group in groups]  # they were sorted anew
        return ""

    def problem_at_forward(self) -> str:
        """Return what is wrong with the parameters that the module had before; "" if nothing is. Cheap."""
        if self._places.are_unchanged():
            return ""
        problem = self.problem_of_model()
        if not problem:  # they have other names now, as parametrizations and pruning give them
            self._places = Places(self.model)
        return problem

    def problem_of_model(self) -> str:
        """Return what is wrong with the module's parameters; "" if nothing is."""
        here = dict(self.model.named_parameters())
        ids = {id(p) for p in here.values()}
        gone = [name for name, p in self.named.items() if id(p) not in ids]
        new = [name for name, p in here.items() if p.requires_grad and id(p) not in self._own]
        if gone and gone[0] in here:
            what = f"parameter {gone[0]!r} of the module is another one than the one that is averaged"
            return f"{what}: it was replaced. {self.advice}"
        if new:
            return f"parameter {new[0]!r} of the module is trained, and not averaged: it is new. {self.advice}"
        if gone:
            return f"parameter {gone[0]!r} is averaged, and no longer in the module. {self.advice}"
        return ""

    def problem(self) -> str:
        """Return what is wrong with either; "" if nothing is."""
        return self.problem_of_optimizer() or self.problem_of_model()


def _same(ones: Collection[Any], others: Collection[Any]) -> bool:
    return len(ones) == len(others) and all(map(_is, ones, others))


def _is(one: Any, other: Any) -> bool:
    return one is other


class GroupNumbers:
    """Numbers of the optimizer's groups, but for those that it changes in its own steps (the ``d`` of Prodigy).

    These follow from gradients, which are a rank's own while ranks step by themselves.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, per_rank: Iterable[str]) -> None:
        self._optimizer, self._per_rank = optimizer, frozenset(per_rank)
        self._reader = Hyperparameters(optimizer, self._per_rank)
        self._before: list[dict[str, Any]] = []
        self.own: set[str] = set()

    def before_step(self) -> None:
        """Remember what they are."""
        self._before = [_plain(group) for group in self._optimizer.param_groups]

    def after_step(self) -> None:
        """Note which have changed."""
        changed: set[str] = set()
        for before, group in zip(self._before, self._optimizer.param_groups, strict=False):
            after = _plain(group)
            if after != before:
                changed |= {key for key, value in after.items() if key in before and value != before[key]}
        if changed - self.own:
            self.own |= changed
            self._reader = Hyperparameters(self._optimizer, self._per_rank | self.own)

    def groups(self) -> list[Numbers]:
        """Return the numbers."""
        return self._reader.groups()

    def digest(self) -> int:
        """Return a hash of the numbers, of 63 bits."""
        text = repr([sorted(numbers.items()) for numbers in self.groups()])
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if type(value) in (int, float)}


@dataclass(frozen=True)
class Report:
    """What a loop has done since the last report.

    Attributes:
        unused: number of forwards that led to no backward; -1 if they are not to be compared.
        zero_grads: how often gradients were cleared; likewise.
        digest: of the groups' numbers.
        groups: these.
        own: names of numbers that the optimizer itself changes; they are not compared.
        problem: what is wrong with the parameters; "" if nothing is.
    """

    unused: int
    zero_grads: int
    digest: int
    groups: list[Numbers]
    own: Collection[str]
    problem: str


class Loop:
    """Loop of this rank, seen through hooks: of the optimizer, its ``zero_grad``, the module and loss scalers.

    Args:
        known: the parameters.
        model, optimizer: what the loop trains.
        per_rank: names of numbers of groups that may differ between ranks.
    """

    def __init__(
        self, known: Known, model: torch.nn.Module, optimizer: torch.optim.Optimizer, per_rank: Iterable[str] = ()
    ) -> None:
        self.known, self.numbers = known, GroupNumbers(optimizer, per_rank)
        self._model, self._optimizer = model, optimizer
        self._index, self._in_step, self._is_excused = LoopIndex(), False, False
        self._strangers = Strangers(known)
        self._handles: list[Any] = []
        self._refused: Callable[[str], None] = lambda _: None

    def watch(self, stepped: Callable[[], None], skipped: Callable[[], None], refused: Callable[[str], None]) -> None:
        """Call ``stepped`` after each step, ``skipped`` when a loss scaler leaves one out (a method: held weakly).

        ``refused`` is called with what is wrong before this rank gets an error about its parameters.
        """

        def before(*_: object) -> None:
            self._require(self.known.problem_of_optimizer())
            self._in_step = True
            self.numbers.before_step()

        def after(*_: object) -> None:
            self._in_step = False
            self.numbers.after_step()
            stepped()
            self._strangers.begin()

        self._refused = refused
        forget_original(self._model)
        self._handles = [
            self._optimizer.register_step_pre_hook(before),
            self._optimizer.register_step_post_hook(after),
            self._model.register_forward_pre_hook(BeforeForward(self._before_forward, watches_copies=True)),
            self._model.register_forward_hook(AfterForward(self._forwarded)),
            ZeroGradHook(self._optimizer, self._zeroed),
        ]
        listen_to_skips(self._optimizer, skipped)
        register_averaged(self.known)

    def close(self) -> None:
        """Take the hooks away."""
        forget_averaged(self.known)
        for handle in self._handles:
            handle.remove()
        stop_listening(self._optimizer)

    def _require(self, problem: str) -> None:
        if problem:
            self._refused(problem)
            raise ValueError(problem)

    def _before_forward(self) -> None:
        if current_graph_task() < 0 and self._is_training():
            self._require(self.known.problem_at_forward() or self._strangers.problem())

    def _is_training(self) -> bool:
        return self._model.training and torch.is_grad_enabled() and not self._in_step

    def _zeroed(self) -> None:
        if not self._in_step:  # closures are evaluated as often as their optimizer likes
            self._index.num_zero_grads += 1

    def _forwarded(self, output: Any) -> None:
        if current_graph_task() < 0 and not self._in_step:
            self._index.note_forward(output)

    def report(self) -> Report:
        """Return what a meeting has to know; what is counted begins anew."""
        numbers, (unused, zero_grads) = self.numbers, self._take_counts()
        own = frozenset(numbers.own)
        return Report(unused, zero_grads, numbers.digest(), numbers.groups(), own, self.known.problem())

    def _take_counts(self) -> tuple[int, int]:
        counts = (-1, -1) if self._is_excused else (self._index.num_unused, self._index.num_zero_grads)
        self._index.restart()
        self._is_excused = False
        return counts

    def excuse(self) -> None:
        """Let what was left out since the last report not be compared: the user has said so."""
        self._is_excused = True


class Strangers:
    """Detects that something other than the optimizer steps the parameters: ranks would never meet."""

    def __init__(self, known: Known) -> None:
        self._advice = known.advice
        params = list(known.named.values())
        self._some = params[:: max(1, len(params) // _LOOKED_AT)]
        self.begin()

    def begin(self) -> None:
        """Begin anew, after a step of their own optimizer."""
        self._num_writes, self._version = 0, self._versions()

    def _versions(self) -> int:
        return sum(map(version_of, self._some))

    def problem(self) -> str:
        """Return what is wrong before a forward; "" if nothing is."""
        version = self._versions()
        if version == self._version:
            return ""
        self._version = version
        self._num_writes += 1
        if self._num_writes < _MOST_WRITES:
            return ""
        return (
            f"something else has changed the parameters {self._num_writes} times since the last step of the optimizer "
            f"whose steps are counted, and ranks meet after its steps only: another optimizer? {self._advice}"
        )


_WORDS = 8
_LEFT_OUT = (
    "Ranks would average what they made of other batches. A rank without a usable batch calls averager.skip_step() "
    "in place of the rest of its step. A forward that is no training step belongs in torch.no_grad(), or after "
    "model.eval()"
)


@dataclass(frozen=True)
class MeetingCheck:
    """What this rank sends when a meeting begins; see the table above.

    Attributes:
        skipped: how many of the steps a loss scaler, or ``skip_step``, has left out.
    """

    weight: float
    meeting: int
    fragment: int
    steps: int
    skipped: int
    is_new: bool
    report: Report

    def compare(self, communicator: Communicator, world: Sequence[int]) -> float:
        """Return the sum of all weights. Collective.

        Args:
            communicator: the ranks.
            world: their names.

        Raises:
            RuntimeError, ValueError: this meeting is none, as the table says; on all ranks.
        """
        gathered = np.empty(communicator.size * _WORDS, np.int64)
        communicator.all_gather(gathered, self._words())
        rows = gathered.reshape(-1, _WORDS)
        if self._differ(rows):
            self._explain(communicator, dict(zip(world, rows.tolist(), strict=True)))
        return float(rows[:, 0].copy().view(np.float64).sum())

    def _words(self) -> np.ndarray:
        weight = int(np.array([self.weight]).view(np.int64)[0])
        where = self.meeting << 16 | self.fragment
        report = self.report
        counts = where, self.steps, report.unused, report.zero_grads
        return np.array([weight, *counts, report.digest, bool(report.problem), self.is_new], np.int64)

    @staticmethod
    def _differ(rows: np.ndarray) -> bool:
        digests, loops = rows[rows[:, 7] == 0, 5], rows[rows[:, 3] >= 0, 3:5]
        alike = (rows[:, 1:3] == rows[0, 1:3]).all() and (loops == loops[:1]).all() and (digests == digests[:1]).all()
        return not alike or bool(rows[:, 6].any())

    def _explain(self, communicator: Communicator, rows: Mapping[int, list[int]]) -> None:
        """Raise the error that names the difference; return if only numbers of ``per_rank`` differ."""
        report = self.report
        groups = None if self.is_new else report.groups
        mine = json.dumps([report.problem, self.skipped, groups, sorted(report.own)]).encode()
        told = [json.loads(words) for words in communicator.channel.all_gather_bytes(mine)]
        by_rank = dict(zip(rows, told, strict=True))
        for rank, (problem, *_) in by_rank.items():
            if problem:
                raise ValueError(f"rank {rank}: {problem}")
        steps = {rank: row[2] for rank, row in rows.items()}
        made = ", ".join(
            f"rank {rank} {count}" + (f" ({by_rank[rank][1]} of them left out)" if by_rank[rank][1] else "")
            for rank, count in steps.items()
        )
        if len(set(steps.values())) > 1:
            behind = [rank for rank, count in steps.items() if count < max(steps.values())]
            raise RuntimeError(
                f"ranks meet that have made different numbers of steps: {name_ranks(behind)} "
                f"{_are(behind)} behind. Steps made: {made}. {_LEFT_OUT}"
            )
        _raise_left_out({rank: row[3] for rank, row in rows.items()}, made, "forwards that no backward() followed")
        _raise_left_out({rank: row[4] for rank, row in rows.items()}, made, "calls of optimizer.zero_grad()")
        meetings = {rank: row[1] >> 16 for rank, row in rows.items()}
        if len({row[1] for row in rows.values()}) > 1:
            raise RuntimeError(f"ranks are in different meetings: {meetings} by rank. Steps made: {made}")
        own = {key for *_, keys in by_rank.values() for key in keys}
        _raise_different({rank: _without(groups, own) for rank, (_, _, groups, _) in by_rank.items()})


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _raise_left_out(counts: Mapping[int, int], made: str, what: str) -> None:
    counts = {rank: count for rank, count in counts.items() if count >= 0}
    if len(set(counts.values())) < 2:
        return
    most = [rank for rank, count in counts.items() if count > min(counts.values())]
    by_rank = ", ".join(f"rank {rank} {count}" for rank, count in counts.items())
    raise RuntimeError(
        f"{name_ranks(most)} left out a batch since the last meeting: {what}: {by_rank}. "
        f"Steps made: {made}. {_LEFT_OUT}"
    )


def _without(groups: list[Numbers] | None, keys: Collection[str]) -> list[Numbers] | None:
    if groups is None:
        return None
    return [{key: number for key, number in group.items() if key not in keys} for group in groups]


def _raise_different(groups: Mapping[int, list[Numbers] | None]) -> None:
    found = first_difference(list(groups.values()))
    if found is None:
        return
    index, key, values = found
    by_rank = ", ".join(
        f"{value!r} on rank {rank}"
        for (rank, own), value in zip(groups.items(), values, strict=True)
        if own is not None
    )
    raise ValueError(
        f"the ranks' optimizers differ: {key!r} of parameter group {index} is {by_rank}. Change it on all ranks alike, "
        f'or write per_rank=("{key}",) if it is meant to differ'
    )


class Trained:
    """Parameters of a worker, checked between pull and push. Training a copy of ``model`` is an error.

    Args:
        model, optimizer: those of the worker, which never steps.
        named: the parameters.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]
    ) -> None:
        self._known = Known(model, optimizer, named, "parameter_server()")
        self._reader = Hyperparameters(optimizer)
        self._copies = watch_copies(model)
        register_averaged(self._known)
        self.remember_numbers()

    def remember_numbers(self) -> None:
        """Remember the numbers of the parameter groups as the servers'."""
        self._numbers = self._reader.groups()

    def require_known(self) -> None:
        """Raise ValueError if the parameters are no longer those of module and optimizer."""
        if problem := self._known.problem():
            raise ValueError(problem)

    def require_same(self) -> None:
        """Raise ValueError if parameters were replaced, or their groups' numbers differ from the servers'."""
        self.require_known()
        found = first_difference([self._numbers, self._reader.groups()])
        if found is not None:
            index, key, (before, now) = found
            raise ValueError(
                f"{key!r} of parameter group {index} was changed on this worker, from {before!r} to {now!r}, and the "
                "servers step: a schedule belongs in server.schedule(). Nothing was pushed"
            )

    def close(self) -> None:
        """Stop checking: copies may be trained, and something else may average the parameters."""
        forget_averaged(self._known)
        self._copies.remove()
