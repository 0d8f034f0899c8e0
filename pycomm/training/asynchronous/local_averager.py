"""Handle of ``local_sgd``."""

from __future__ import annotations

import copy
import functools
import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pycomm import checks
from pycomm.agreement import exchanged
from pycomm.collectives.broadcasting import broadcast_parts, broadcast_tensors
from pycomm.collectives.communicator import Communicator
from pycomm.compression.dense import method_text
from pycomm.compression.saved_state import CONTRIBUTIONS
from pycomm.descriptions import counted, settings_text, tensors_text
from pycomm.errors import CommError, attempt
from pycomm.torch_internals import renamed
from pycomm.training.asynchronous.buffers import MeetingBuffers, Values
from pycomm.training.asynchronous.elastic_group import ElasticGroup
from pycomm.training.asynchronous.fragment import Fragment
from pycomm.training.asynchronous.loop import Loop
from pycomm.training.reductions.record import Record
from pycomm.untrusted import COUNT, ListOf, OneOf, PairOf, parse, require

_FORMAT = 3
_COUNTERS = {
    "steps": COUNT,
    "launched": COUNT,
    "under_way": ListOf(PairOf(COUNT, COUNT)),
    "fragments": ListOf(PairOf(OneOf(None, COUNT), COUNT)),
}


@dataclass(frozen=True)
class MeetingSchedule:
    """Schedule of the fragments' meetings.

    Attributes:
        every: number of steps between meetings of a fragment.
        delay: number of steps from the beginning of a meeting to its end.
        turns: for each fragment, the step of a period of ``every`` steps after which it begins to meet.
    """

    every: int
    delay: int
    turns: tuple[int, ...]

    def begin(self, num_steps: int) -> list[int]:
        """Return the fragments whose meetings begin after ``num_steps`` steps."""
        phase = (num_steps - 1) % self.every + 1
        return [i for i, turn in enumerate(self.turns) if turn == phase]


@dataclass
class _Progress:
    num_steps: int = 0


def _end(communicator: Communicator, progress: _Progress) -> None:
    """Tell waiting ranks that this one's averager or process has ended."""
    communicator.close(f"it has ended its training after step {progress.num_steps}")


class LocalAverager:
    """Handle of :func:`local_sgd`. The optimizer keeps it alive.

    Attributes:
        optimizer: ranks meet after its steps.
    """

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        fragments: Sequence[Fragment],
        schedule: MeetingSchedule,
        group: ElasticGroup | None,
        buffers: MeetingBuffers,
        loop: Loop,
    ) -> None:
        self.optimizer, self._loop = optimizer, loop
        self._weight, self._is_attached = 1.0, True
        self._communicator, self._schedule, self._group = communicator, schedule, group
        self._fragments, self._buffers = list(fragments), buffers
        self._buffer_values: dict[int, Values] = {}  # what the buffers become after meetings under way, by number
        self._under_way: list[tuple[int, Fragment]] = []  # meetings by number, the oldest first
        self._num_launched = self._num_committed = self._num_meetings = self._num_skipped = 0
        self._invitations: dict[int, int] = {}  # join requests by the meetings that announced them
        self._invited = 0  # join request to admit after this step; 0 for none
        self._progress = _Progress()
        self._finalizer = weakref.finalize(self, _end, communicator, self._progress)
        self._is_new, self._seconds = False, 0.0  # a new rank has hyperparameters of its own
        self._record = Record(
            loop.source(
                steps_made=lambda: (self._num_steps, self._num_skipped),
                meeting=lambda: (self._num_launched, self._fragments.index(self._under_way[-1][1])),
                groups=lambda: None if self._is_new else loop.numbers.read(),
            )
        )
        loop.watch(self._stepped, self._skipped, self._refused)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._description() if self._is_attached else 'detached'})"

    @property
    def _num_steps(self) -> int:
        return self._progress.num_steps

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that take part, by the numbers that they got when they joined. It changes with "shrink" only."""
        return tuple(range(self._communicator.size)) if self._group is None else self._group.world

    def _description(self) -> str:
        fragments, schedule = self._fragments, self._schedule
        params = tensors_text(param for fragment in fragments for param in fragment.params)
        outer, delay = fragments[0].outer, f" with a delay of {schedule.delay}" if schedule.delay else ""
        what = [
            *(counted(len(self.world), "rank"), self._communicator.transport),
            f"{params} in {counted(len(fragments), 'fragment')}",
            f"every {counted(schedule.every, 'step')}{delay}",
            *([] if outer is None else [settings_text(outer)]),
            method_text(fragments[0].method),
        ]
        return ", ".join(what)

    # Meetings.

    def _skipped(self) -> None:
        """Count a step that a loss scaler skips on this rank."""
        self._num_skipped += 1
        self._stepped()

    def _refused(self, problem: str) -> None:
        """Report to the waiting ranks that this rank raises an error about its parameters."""
        self._leave(problem)

    def _stepped(self) -> None:
        start = time.perf_counter()
        self._progress.num_steps += 1
        delay = self._schedule.delay
        while self._under_way and self._under_way[0][1].steps_since_launch(self._num_steps) >= delay:
            self._end_oldest_meeting(is_late=True)
        for index in self._schedule.begin(self._num_steps):
            self._begin_meeting(index)
            if delay == 0:
                self._end_oldest_meeting()
        if self._invited:  # last, as the new rank continues with the next step
            self._admit_newcomer()
        self._seconds += time.perf_counter() - start

    def _begin_meeting(self, index: int) -> None:
        self._num_launched += 1
        fragment = self._fragments[index]
        self._under_way.append((self._num_launched, fragment))
        values, weight = self._record.read(), np.array([self._weight]).view(np.int64)
        self._loop.restart()
        number, begun = self._num_launched, self._buffers.begin()

        def compare(communicator: Communicator) -> float:
            weights = self._record.meet(communicator, self.world, values, int(weight[0]))
            self._buffer_values[number] = self._buffers.exchange(begun)
            return float(weights[:, 0].copy().view(np.float64).sum())

        fragment.launch(compare, self._weight, self._num_steps, functools.partial(self._commit, number))

    def _commit(self, number: int) -> None:
        """Count the meeting, once all ranks have its mean; on the communication thread."""
        if self._group is not None:
            self._invitations[number] = self._group.commit()
        self._num_committed = number

    def _end_oldest_meeting(self, *, is_late: bool = False) -> None:
        number, fragment = self._under_way[0]
        try:
            self._receive(fragment)
        finally:
            del self._under_way[0]
        fragment.apply_mean(is_late=is_late)
        self._buffers.apply(self._buffer_values.pop(number, {}))
        if not is_late:
            fragment.met_at = self._num_steps
        self._num_meetings += 1
        self._invited = self._invitations.pop(number, 0) or self._invited

    def _receive(self, fragment: Fragment) -> None:
        while not fragment.has_mean:
            try:
                fragment.receive()
            except CommError as error:
                self._recover(_in_meeting(error, self._num_steps))

    def _recover(self, error: CommError) -> None:
        """Continue among the remaining ranks, and repeat incomplete meetings; or raise ``error``."""
        if self._group is None:
            raise error

        def catch_up(committed: int) -> None:
            for number, fragment in self._under_way:
                if number <= committed and not fragment.has_mean:
                    fragment.take_mean()

        self._num_committed = self._group.recover(error, self._num_committed, catch_up)
        self._invitations, self._invited = {}, 0  # the first rank announces the newcomer again
        self._move()

    def _move(self) -> None:
        for fragment in self._fragments:
            fragment.move(self._communicator)
        for number, fragment in self._under_way:
            if not fragment.has_mean:
                fragment.launch_again(functools.partial(self._commit, number))

    # Newcomers.

    def _admit_newcomer(self) -> None:
        for _, fragment in self._under_way:  # these meetings are of the old group
            self._receive(fragment)
        number, self._invited, self._invitations = self._invited, 0, {}  # others are announced again
        if number == 0 or self._group is None:  # a rank was lost meanwhile
            return
        try:
            self._group.admit(number)
            self._move()
            self.share_state(is_newcomer=False)
        except (RuntimeError, ValueError) as error:  # CommError and the store's errors are RuntimeErrors
            refused = f"the newcomer was not let in: {error}"
            others = CommError.during("join", refused, rank=self._communicator.rank)
            self._recover(error if isinstance(error, CommError) else others)

    @torch.no_grad()
    def share_state(self, *, is_newcomer: bool) -> None:
        """Send the group's state to a new rank. Collective, with the new rank; meetings under way have their means."""
        mine = json.dumps(self._counters()).encode() if self._communicator.rank == 0 else b""
        counters = parse(self._communicator.channel.all_gather_bytes(mine)[0], _COUNTERS, "the counters of rank 0")
        if is_newcomer:
            self._resume(counters)
            self._is_new = True
        for fragment in self._fragments:
            broadcast_tensors(self._communicator, fragment.shared(), src=0)
            if is_newcomer:
                fragment.move_to_anchor()
        buffers = [content.part if is_newcomer else content.value for content in self._buffers.take(copies=True)[0]]
        broadcast_parts(self._communicator, buffers, src=0)

    def _counters(self) -> dict[str, Any]:
        places = [[number, self._fragments.index(fragment)] for number, fragment in self._under_way]
        return {
            "steps": self._num_steps,
            "launched": self._num_launched,
            "under_way": places,
            "fragments": [[fragment.launched, fragment.num_meetings] for fragment in self._fragments],
        }

    def _resume(self, counters: dict[str, Any]) -> None:
        """Continue from the counters of another rank or of an earlier run; meetings under way have their means."""
        self._loop.exclude_counts()  # they do not begin at a meeting
        self._progress.num_steps, self._num_launched = counters["steps"], counters["launched"]
        self._num_committed = self._num_launched
        self._under_way = [(number, self._fragments[index]) for number, index in counters["under_way"]]
        for fragment, (launched, num_meetings) in zip(self._fragments, counters["fragments"], strict=True):
            fragment.resume(launched, num_meetings)

    # What users call.

    def set_weight(self, num_samples: float) -> None:
        """Weight this rank by its number of samples or tokens in later meetings. All ranks start with equal weights.

        Raises:
            TypeError, ValueError: ``num_samples`` is not a positive number.
        """
        self._require_attached()
        self._weight = checks.positive("num_samples", num_samples)

    def skip_step(self) -> None:
        """Skip this step, because its batch cannot be used. Call it in place of the rest of the step.

        The step still counts, so that ranks meet after equally many batches. Steps that a ``pycomm.LossScaler`` or
        torch's ``GradScaler`` skips need no call.
        """
        self._require_attached()
        self._loop.exclude_counts()
        self._skipped()

    def meet(self) -> None:
        """Average all fragments that have not met since the last step, as at the end of training. Collective."""
        self._require_attached()
        start = time.perf_counter()
        while self._under_way:
            self._end_oldest_meeting(is_late=True)
        for index, fragment in enumerate(self._fragments):
            if fragment.met_at != self._num_steps:  # else momentum would move it again without a new step
                self._begin_meeting(index)
                self._end_oldest_meeting()
        self._seconds += time.perf_counter() - start

    def take_center(self) -> None:
        """Set the parameters to the center, or to the last meeting's parameters; the same on all ranks."""
        self._require_attached()
        for fragment in self._fragments:
            fragment.move_to_anchor()

    def stats(self) -> dict[str, Any]:
        """Return ``steps``, ``meetings`` (of fragments), ``bytes_sent``, ``wait_seconds`` and ``skipped``.

        ``wait_seconds`` is the time in meetings; ``skipped`` counts the steps skipped by a loss scaler or
        :meth:`skip_step`. With "shrink" also ``changes``, a dict for each change of the group: ``world``, the ranks
        after it, and either ``joined``, the new rank, or ``left``, the fates of lost ranks, and ``seconds``.
        """
        stats = {
            "steps": self._num_steps,
            "skipped": self._num_skipped,
            "meetings": self._num_meetings,
            "bytes_sent": sum(fragment.bytes_sent for fragment in self._fragments),
            "wait_seconds": self._seconds,
        }
        return stats if self._group is None else {**stats, "changes": list(self._group.events)}

    def state_dict(self) -> dict[str, Any]:
        """Return counters, and by parameter its value at its last meeting, outer velocity and residual.

        All but the residuals of compression is equal on all ranks. With residuals it is collective: ``["sums"]`` has
        their sums, and ``["identity"]`` says whose the own ones are. Waits for meetings under way. It loads with
        ``torch.load(weights_only=True)``.
        """
        self._require_attached()
        for _, fragment in self._under_way:
            self._receive(fragment)
        state, communicator = copy.deepcopy(self._state()), self._communicator
        entries = state["compression"].items()
        sums = {name: {key: x.clone() for key, x in entry.items() if key in CONTRIBUTIONS} for name, entry in entries}
        for each in [each for entry in sums.values() for each in entry.values()]:
            communicator.all_reduce(each)
        identity = {"rank": communicator.rank, "world_size": communicator.size} if any(sums.values()) else {}
        buffers = {str(number): dict(values) for number, values in self._buffer_values.items()}
        own = {"buffers": buffers, "sums": sums, "identity": identity}
        return {"format": _FORMAT, "counters": self._counters(), **state, **own}

    def _state(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for fragment in self._fragments:
            for what, entries in fragment.state().items():
                found.setdefault(what, {}).update(entries)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned. The parameters stay as they are: load the model's own state.

        Collective. Unless each rank loads its own state, of as many ranks, all get an equal part of the residuals' sum.

        Raises:
            ValueError: on every rank: it is of other parameters, or was saved with other settings. Nothing is changed
                then.
        """
        self._require_attached()
        names = [name for fragment in self._fragments for name in fragment.names]
        if isinstance(state, dict):
            state = {what: renamed(each, names) if isinstance(each, dict) else each for what, each in state.items()}
        for _, fragment in self._under_way:
            self._receive(fragment)
        check = attempt(lambda: _check_state(state, self._state(), self._fragments))
        gather = self._communicator.channel.all_gather_bytes
        identities = list(enumerate(exchanged(gather, check, "load the state", lambda _: state["identity"])))
        size = len(identities)
        if any(identity not in ({}, {"rank": rank, "world_size": size}) for rank, identity in identities):
            entries, sums = state["compression"], state["sums"]
            parts = {name: entry | {k: x / size for k, x in sums[name].items()} for name, entry in entries.items()}
            state = {**state, "compression": parts}
        self._resume(state["counters"])
        self._buffer_values = {int(number): dict(values) for number, values in state["buffers"].items()}
        for fragment in self._fragments:
            fragment.load_state(state)

    def detach(self) -> None:
        """End the averaging and release its memory. Idempotent."""
        if self._is_attached:
            self._is_attached = False
            self._loop.close()
            self._buffers.close()
            self._leave(f"it has ended its training (detach) after step {self._num_steps}")

    def _require_attached(self) -> None:
        if not self._is_attached:
            raise RuntimeError(f"this {type(self).__name__} is detached")

    def _leave(self, reason: str) -> None:
        if self._group is not None:
            self._group.close(reason)
        self._communicator.close(reason)
        self._finalizer.detach()


def _in_meeting(error: CommError, num_steps: int) -> CommError:
    """Return ``error`` with the step of the meeting in its text."""
    waits = f"{error} (rank {error.rank} waits in the meeting after step {num_steps})"
    made = CommError(waits, rank=error.rank, peer=error.peer, operation=error.operation, elapsed=error.elapsed)
    made.__cause__ = error.__cause__
    return made


def _shapes(entries: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Size]]:
    return {name: {key: tensor.shape for key, tensor in entry.items()} for name, entry in entries.items()}


def _check_state(state: dict[str, Any], current: dict[str, Any], fragments: Sequence[Fragment]) -> None:
    """Raise ValueError if ``state`` cannot replace ``current``."""
    wanted = {"format", "counters", "buffers", "sums", "identity", *current}
    if not isinstance(state, dict) or state.keys() != wanted or state["format"] != _FORMAT:
        raise ValueError("state is not a LocalAverager.state_dict()")
    require(state["counters"], _COUNTERS, "state['counters']")
    for what in ("anchors", "velocities"):
        if {n: t.shape for n, t in state[what].items()} != {n: t.shape for n, t in current[what].items()}:
            raise ValueError(f"state[{what!r}] is of other parameters, or of another outer optimizer")
    if _shapes(state["compression"]) != _shapes(current["compression"]):
        raise ValueError("state['compression'] is of another compression")
    number = len(state["counters"]["fragments"])
    if number != len(fragments):
        raise ValueError(f"state is of {number} fragments, not {len(fragments)}")
    under_way = [fragments[index] for _, index in state["counters"]["under_way"]]
    if state["means"].keys() != {name for fragment in under_way for name in fragment.names}:
        raise ValueError("state lacks the means of meetings that were under way")
