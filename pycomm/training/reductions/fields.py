"""Fields of a record: what must be the same on all ranks, each with this rank's value and the error of a difference.

:data:`FIELDS` is the table, in the order in which errors are raised: a cause comes before its effects. An engine (the
Reducer, DistributedDataParallel's hook, HSDP, local SGD, gossip, a server's worker) compares the fields that its
:class:`Source` can read.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch

from pycomm.agreement import require_same
from pycomm.descriptions import counts_text, name_ranks, values_text
from pycomm.optim.hyperparameters import Hyperparameters, Numbers, require_equal_groups
from pycomm.untrusted import ANYTHING, COUNT, ListOf, MapOf, OneOf

Read = Callable[[], Any]

_PAIRED = (
    "Their gradients would be averaged with other batches' gradients. A rank without a usable batch calls "
    "reducer.skip_batch() in place of forward and backward, or reducer.veto_step() to have the step left out on all. "
    "What belongs to no training step goes in `with reducer.paused():`, or a forward in torch.no_grad()"
)


@dataclass(frozen=True)
class FieldWords:
    """Parts of errors that depend on the engine.

    Attributes:
        left_out: what a rank without a usable batch does instead.
        whose: what the ranks are counted among.
        since: when ranks were compared last.
        permitting: argument that lets a number of parameter groups differ, with ``{}`` for its key.
    """

    left_out: str = _PAIRED
    whose: str = ""
    since: str = "the last reduction"
    permitting: str = 'tuning=pycomm.Tuning(per_rank=("{}",))'


@dataclass(frozen=True)
class Source:
    """What an engine can read of this rank's training.

    Attributes:
        values: functions that return the present value of a field, by its name. A value can be compared by ``==``;
            ``None``: this rank is not compared.
        details: functions that describe a value to other ranks, called only after a difference, where the value alone
            does not.
        module: returns the module that is trained, if there is one; for fields that read it themselves.
        words: parts of errors.
        warns: returns whether this rank logs warnings that concern all ranks.
    """

    values: Mapping[str, Read]
    details: Mapping[str, Read] = field(default_factory=dict)
    module: Callable[[], torch.nn.Module | None] = lambda: None
    words: FieldWords = FieldWords()
    warns: Callable[[], bool] = lambda: True


class FieldKind(Enum):
    """How ranks notice a field.

    HASHED: a hash of the value is compared. FLAG: a value other than ``None``, False and (), even if all ranks agree.
    DETAIL: not at all; it is looked at if something else differs.
    """

    HASHED, FLAG, DETAIL = range(3)


Details = Mapping[int, Mapping[str, Any]]
"""Details of all fields, by rank and name."""


class Field:
    """A guarantee: something that must be the same on all ranks.

    Attributes:
        name: key in records, and in :attr:`Source.values`.
        kind: see :class:`FieldKind`.
        form: shape of :meth:`detail`, for :func:`pycomm.untrusted.parse`.
        default: value that is hashed for a rank that is not compared.
        of_pass: whether a rank without a pass of its own is not compared.
    """

    name: ClassVar[str]
    kind: ClassVar[FieldKind] = FieldKind.HASHED
    form: ClassVar[Any] = ANYTHING
    default: ClassVar[Any] = None
    of_pass: ClassVar[bool] = False

    def __init__(self, read: Read, source: Source) -> None:
        self.read, self.source = read, source

    @classmethod
    def of(cls, source: Source) -> Field | None:
        """Return the field of ``source``; ``None`` if it has no such value."""
        read = source.values.get(cls.name)
        return None if read is None else cls(read, source)

    def hashed(self, value: Any) -> Any:
        """Return what is hashed of ``value``: by ``repr``, which must be the same in every process."""
        return self.default if value is None else value

    def detail(self, value: Any) -> Any:
        """Return what other ranks get to see of ``value``, as JSON can hold it."""
        late = self.source.details.get(self.name)
        return value if late is None or value is None else late()

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        """Raise an error, the same on all ranks, if the ranks differ.

        Args:
            by_rank: details of this field of the ranks that are compared.
            details: details of all fields.
        """
        raise NotImplementedError


class ProblemField(Field):
    """What is wrong with a rank's parameters; ``None`` if nothing is."""

    name, kind, form = "problem", FieldKind.FLAG, str

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        for rank, problem in by_rank.items():
            if problem:
                raise ValueError(f"rank {rank}: {problem}")


class StepsMadeField(Field):
    """Number of steps of a rank that meets others after its steps, and of those among them that it left out."""

    name, form = "steps_made", ListOf(COUNT, 2)

    def hashed(self, value: Any) -> Any:
        return value[0]

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        steps = {rank: made for rank, (made, _) in by_rank.items()}
        behind = [rank for rank, made in steps.items() if made < max(steps.values())]
        if behind:
            raise RuntimeError(
                f"ranks meet that have made different numbers of steps: {name_ranks(behind)} "
                f"{'is' if len(behind) == 1 else 'are'} behind. {_steps_text(details)}{self.source.words.left_out}"
            )


def _steps_text(details: Details) -> str:
    """Return a sentence about the steps of all ranks; "" if they are not known."""
    made = {rank: each["steps_made"] for rank, each in details.items() if each.get("steps_made") is not None}
    texts = [f"rank {rank} {all_}" + f" ({out} of them left out)" * bool(out) for rank, (all_, out) in made.items()]
    return f"Steps made: {', '.join(texts)}. " if texts else ""


class NewField(Field):
    """Names of the optimizer's parameters that are not averaged yet. If all ranks have some, they are added."""

    name, kind, form = "new", FieldKind.FLAG, ListOf(str)

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        raise_different_new(by_rank)


def raise_different_new(new: Mapping[int, Sequence[str]]) -> None:
    """Raise RuntimeError if parameters are ``new`` on some ranks only."""
    have = [rank for rank, names in new.items() if names]
    lack = [rank for rank, names in new.items() if not names]
    if have and lack:
        raise RuntimeError(
            f"there is a new parameter, {new[have[0]][0]!r}, on {name_ranks(have)}, and none on {name_ranks(lack)}: "
            "add, replace or unfreeze parameters on all ranks, between the same steps, and have reduce() average "
            "gradients of frozen ones on all ranks or on none"
        )


class MembersField(Field):
    """Names of the parameters in the optimizer."""

    name, kind, form = "members", FieldKind.DETAIL, ListOf(str)

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        if found := _not_everywhere(by_rank):
            name, _, lack = found
            raise RuntimeError(
                f"parameter {name!r} is no longer in the optimizer on {name_ranks(lack)}, and still is on the others: "
                "remove parameters from its groups on all ranks, between the same steps"
            )


def _not_everywhere(names: Mapping[int, Sequence[str]]) -> tuple[str, list[int], list[int]] | None:
    """Return the first name that some ranks lack, the ranks that have it, and those others; ``None`` without one."""
    sets = {rank: set(each) for rank, each in names.items()}
    for name in itertools.chain(*names.values()):
        if lack := [rank for rank, each in sets.items() if name not in each]:
            return name, [rank for rank in sets if rank not in lack], lack
    return None


class LoopField(Field):
    """Number of unused forwards and of calls of ``zero_grad``, whether backward added to gradients that were used, and
    number of passes that were cleared inside a window: ``LoopIndex.counts``.
    """

    name, form, of_pass = "loop", ListOf(OneOf(COUNT, bool), 4), True
    default = (0, 1, False, 0)

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        words = self.source.words
        cleared = {rank: num_cleared for rank, (_, _, _, num_cleared) in by_rank.items()}
        if len(set(cleared.values())) > 1:
            odd = [rank for rank, number in cleared.items() if number != min(cleared.values())]
            raise RuntimeError(
                f"{name_ranks(odd)} cleared gradients inside an accumulation window (zero_grad() of the optimizer or "
                f"module, or .grad = None), the others did not: passes that were discarded since {words.since}: "
                f"{counts_text(cleared)}. Clear them on all ranks, or on none"
            )
        accumulated = [rank for rank, (_, _, flag, _) in by_rank.items() if flag]
        if 0 < len(accumulated) < len(by_rank):
            raise RuntimeError(
                f"{name_ranks(accumulated)} added this backward() to gradients that the last optimizer.step() has "
                "used, the others did not: optimizer.zero_grad() was left out there"
            )
        for index, what, behind in (
            (0, "forwards for training", " that no backward() followed"),
            (1, "calls of optimizer.zero_grad()", ""),
        ):
            counts = {rank: loop[index] for rank, loop in by_rank.items()}
            if odd := [rank for rank, count in counts.items() if count != min(counts.values())]:
                what = f"{what} since {words.since}{behind}: {counts_text(counts)}"
                advice = _steps_text(details) + words.left_out
                raise RuntimeError(f"{name_ranks(odd)}{words.whose} left out a batch: {what}. {advice}")


class OptimizerStepsField(Field):
    """By the name of an optimizer's first parameter, the number of its steps since the last reduction."""

    name, form, default, of_pass = "optimizer_steps", MapOf(COUNT), (), True

    def hashed(self, value: Any) -> Any:
        return [value[name] for name in sorted(value or ())]

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        for name in {name: None for steps in by_rank.values() for name in steps}:
            counts = {rank: steps.get(name, 0) for rank, steps in by_rank.items()}
            if len(set(counts.values())) > 1:
                raise RuntimeError(
                    f"the ranks{self.source.words.whose} are out of step: calls of step() of the optimizer of {name!r} "
                    f"since the last backward pass that was averaged: {counts_text(counts)}. Take the same steps on "
                    "all ranks"
                )


IN_STEP = " in the last optimizer.step(), for which it was set after backward(),"
"""Name of the numbers of a Reducer's groups in the last step, in :class:`GroupsField` and in errors."""


class GroupsRead(NamedTuple):
    """Numbers of an optimizer's groups, as they were read.

    Attributes:
        name: which optimizer's.
        digest: hash of the numbers.
        groups: returns the numbers of each group.
        own: keys of numbers that the optimizer itself changes, which are not compared.
    """

    name: str
    digest: int
    groups: Callable[[], list[Numbers]]
    own: Collection[str] = ()


def groups_read(readers: Mapping[str, Hyperparameters]) -> list[GroupsRead]:
    """Return what ``readers`` have read last, by their names."""
    return [GroupsRead(name, reader.digest, reader.groups) for name, reader in readers.items()]


class GroupsField(Field):
    """Numbers (lr, momentum, betas, ...) in the groups of optimizers."""

    name = "groups"
    form = MapOf({"groups": ListOf(MapOf(ANYTHING)), "own": ListOf(str)})

    def hashed(self, value: Any) -> Any:
        return sorted((each.name, each.digest) for each in value or ())

    def detail(self, value: Any) -> Any:
        if value is None:
            return None
        return {name: {"groups": groups(), "own": sorted(own)} for name, _, groups, own in value}

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        names = {name: None for named in by_rank.values() for name in named}
        for name in names:
            named = {rank: each[name] for rank, each in by_rank.items() if name in each}
            own = {key for each in named.values() for key in each["own"]}
            groups = {
                rank: [{key: n for key, n in group.items() if key not in own} for group in each["groups"]] or None
                for rank, each in named.items()  # a newcomer has made no step yet
            }
            whose = f" of the optimizer of {name!r}" if len(names) > 1 else ""
            require_equal_groups(groups, self.source.words.permitting, name if name in ("", IN_STEP) else whose)


class LossScaleField(Field):
    """Scale of the loss, if the host knows it."""

    name, of_pass = "loss_scale", True

    def detail(self, value: Any) -> Any:
        return None if value is None else repr(value)

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        if len(set(by_rank.values())) > 1:
            raise ValueError(
                f"the ranks' loss scalers differ: the scale is {values_text(by_rank)}. Create the scaler with the same "
                "arguments on all ranks, load its state on all of them, and call update() after the same steps"
            )


class FrozenField(Field):
    """Names of frozen parameters, if a gradient is missing."""

    name, form = "frozen", ListOf(str)

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        if found := _not_everywhere(by_rank):
            name, have, lack = found
            raise RuntimeError(
                f"parameter {name!r} is frozen (requires_grad=False) on {name_ranks(have)}, and trained on "
                f"{name_ranks(lack)}: freeze it on all ranks, or on none"
            )


def _with_pass(by_rank: Mapping[int, Any], details: Details) -> dict[int, Any]:
    return {rank: value for rank, value in by_rank.items() if details[rank].get("loop") is not None}


class PlacesField(Field):
    """Attached parameters that have moved within the module; see ``ParameterPlaces``."""

    name, form = "places", MapOf(str)

    def hashed(self, value: Any) -> Any:
        return sorted(value.items())

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        def text(at: str | None) -> str:
            return "as it was" if at is None else f"attached as {at!r}" if at else "gone"

        trained = _with_pass(by_rank, details)
        for name in {name: None for moved in trained.values() for name in moved}:
            places = {rank: text(moved.get(name)) for rank, moved in trained.items()}
            if len(set(places.values())) > 1:
                raise RuntimeError(
                    f"the module's parameter {name!r} is {values_text(places)}: a layer or a parameter was exchanged, "
                    "tied or left out on some ranks only. Make the same changes on all ranks, between the same steps"
                )


class ModesField(Field):
    """Training or evaluation mode of the module, or a hash of the modes of all modules in it."""

    name, form = "modes", MapOf(bool)

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        modes = _with_pass(by_rank, details)
        first: Mapping[str, bool] = next(iter(modes.values()), {})
        for name in (name for name in first if all(name in of for of in modes.values())):
            training = [rank for rank, of in modes.items() if of[name]]
            others = [rank for rank in modes if rank not in training]
            if training and others:
                raise RuntimeError(
                    f"{f'module {name!r}' if name else 'the model'} is in evaluation mode (eval()) on "
                    f"{name_ranks(others)}, and in training mode on {name_ranks(training)}. "
                    "Dropout and BatchNorm then behave differently there. "
                    "After an evaluation call model.train(). If it is meant to differ, write "
                    'tuning=pycomm.Tuning(per_rank=("training",))'
                )


class WindowLengthField(Field):
    """Number of passes that a function has put into this window; 0 if it is fixed. :attr:`Source.details` has the
    number of the reduction.

    The ranks may differ once, perhaps at the end of an epoch, with a warning; twice in a row it is an error.
    """

    name, form, default, of_pass = "window", ListOf(COUNT, 2), 0, True

    def __init__(self, read: Read, source: Source) -> None:
        super().__init__(read, source)
        self._uneven = -2  # last reduction in which they differed

    def detail(self, value: Any) -> Any:
        return None if value is None else [value, super().detail(value)]

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        passes = {rank: str(number) for rank, (number, _) in by_rank.items() if number}
        if len(set(passes.values())) < 2:
            return
        text = (
            f"accumulate's function has ended this window after a number of backward passes that is "
            f"{values_text(passes)}. Each rank's sum of gradients counts the same in the average, whatever its number "
            "of batches: call reducer.set_weight(num_samples) before each backward() on all ranks, or let the function "
            "return the same on all ranks"
        )
        before, self._uneven = self._uneven, max(reduction for _, reduction in by_rank.values())
        if before == self._uneven - 1:
            raise RuntimeError(text)
        if self.source.warns():
            warnings.warn(text, RuntimeWarning, stacklevel=2)


class MeetingField(Field):
    """Number of a meeting, and of the fragment that meets."""

    name, form = "meeting", ListOf(COUNT, 2)

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        meetings = {rank: number for rank, (number, _) in by_rank.items()}
        if len(set(map(tuple, by_rank.values()))) > 1:
            steps = next(each["steps_made"][0] for each in details.values())
            raise RuntimeError(f"after {steps} steps of each, ranks are in different meetings: {meetings} by rank")


class LinesField(Field):
    """Lines of text that must be the same.

    Attributes:
        what: name of a line in errors.
    """

    form = ListOf(str)
    what: ClassVar[str]

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        require_same([{self.what: lines} for lines in by_rank.values()], "compare", hint=self.source.words.left_out)


class SettingsField(LinesField):
    """Settings of each group of an optimizer whose step ranks share out."""

    name, what = "settings", "parameter group"


class LoadedField(LinesField):
    """Hashes of the optimizer's state that was loaded since the last step that ranks share out."""

    name, what = "loaded", "state loaded since the last step, of parameter"


class FactorField(LinesField):
    """Factor of the gradients in such a step, unless this rank skips it."""

    name, what = "factor", "factor of the gradients (clipping, loss scale)"

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        if len(by_rank) == len(details):  # else a rank skips the step, so that all leave it out
            super().check(by_rank, details)


class VetoField(Field):
    """Reason for which this rank vetoes the step; ``None`` without a veto."""

    name, kind = "veto", FieldKind.FLAG
    form: ClassVar[Any] = str

    def check(self, by_rank: Mapping[int, Any], details: Details) -> None:
        """Any rank may ask."""


class StopField(VetoField):
    """Reason for which this rank asks all to stop; ``None`` without a request."""

    name = "stop"


class SkipField(VetoField):
    """Whether this rank has no batch: the mean is over the other ranks."""

    name, form = "skip", bool


FIELDS: list[type[Field]] = [
    *(ProblemField, StepsMadeField, NewField, MembersField, LoopField, OptimizerStepsField, GroupsField),
    *(LossScaleField, FrozenField, PlacesField, ModesField, WindowLengthField, MeetingField),
    *(SettingsField, LoadedField, FactorField, VetoField, SkipField, StopField),
]
"""All fields, in the order of their errors."""
