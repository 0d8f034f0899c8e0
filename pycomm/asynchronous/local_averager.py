"""Handle of ranks that step by themselves and meet every so many steps."""

from __future__ import annotations

import functools
import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.asynchronous.averager import Averager, copied
from pycomm.asynchronous.elastic_group import ElasticGroup
from pycomm.asynchronous.fragment import Fragment
from pycomm.asynchronous.loop import Loop, MeetingCheck
from pycomm.broadcasting import broadcast_tensors
from pycomm.communicator import Communicator
from pycomm.compression.dense import method_text
from pycomm.descriptions import counted, settings_text, tensors_text
from pycomm.errors import CommError
from pycomm.tensor_memory import shared_parts

_FORMAT = 2


@dataclass(frozen=True)
class Rhythm:
    """When fragments meet.

    Attributes:
        every: number of steps from one meeting of a fragment to its next.
        delay: number of steps from the beginning of a meeting to its end.
        turns: of every so many steps, the one after which each fragment begins to meet.
    """

    every: int
    delay: int
    turns: tuple[int, ...]

    def begin(self, num_steps: int) -> list[int]:
        """Return the fragments that begin to meet after so many steps."""
        phase = (num_steps - 1) % self.every + 1
        return [i for i, turn in enumerate(self.turns) if turn == phase]


@dataclass
class MeetingProgress:
    """Number of steps of an averager, which outlives it."""

    num_steps: int = 0


def _end(communicator: Communicator, progress: MeetingProgress) -> None:
    """Tell the ranks that still wait for this one that its averager or its process has ended."""
    communicator.close(f"it has ended its training after step {progress.num_steps}")


def _description(num_ranks: int, communicator: Communicator, fragments: Sequence[Fragment], rhythm: Rhythm) -> str:
    """Return who meets, about what, and how, in the words of ``repr``."""
    params = tensors_text(param for fragment in fragments for param in fragment.params)
    outer, delay = fragments[0].outer, f" with a delay of {rhythm.delay}" if rhythm.delay else ""
    what = [
        *(counted(num_ranks, "rank"), communicator.transport),
        f"{params} in {counted(len(fragments), 'fragment')}",
        f"every {counted(rhythm.every, 'step')}{delay}",
        *([] if outer is None else [settings_text(outer)]),
        method_text(fragments[0].method),
    ]
    return ", ".join(what)


class LocalAverager(Averager):
    """Averager of ranks that wait for each other: all make equally many steps from one meeting to the next."""

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        fragments: Sequence[Fragment],
        rhythm: Rhythm,
        group: ElasticGroup | None,
        buffers: Sequence[torch.Tensor],
        loop: Loop,
    ) -> None:
        self._communicator, self._rhythm, self._group = communicator, rhythm, group
        self._fragments, self._buffers = list(fragments), list(buffers)
        for fragment in self._fragments:
            fragment.open(communicator)
        self._under_way: list[tuple[int, Fragment]] = []  # meetings that are not over, with their numbers
        self._num_launched = self._num_committed = 0
        self._invitations: dict[int, int] = {}  # newcomers' requests by the meetings that have announced them
        self._invited = 0  # request of the one that is let in next; 0 for none
        self._num_meetings = self._num_skipped = 0
        self._progress = MeetingProgress()
        self._finalizer = weakref.finalize(self, _end, communicator, self._progress)
        self._is_new, self._seconds = False, 0.0  # new: a newcomer, with groups of its own
        super().__init__(optimizer, loop)

    @property
    def _num_steps(self) -> int:
        return self._progress.num_steps

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that meet, by the numbers they were given when they joined; it changes only with "shrink"."""
        return tuple(range(self._communicator.size)) if self._group is None else self._group.world

    def _description(self) -> str:
        return _description(len(self.world), self._communicator, self._fragments, self._rhythm)

    # Meetings.

    def _skipped(self) -> None:
        self._num_skipped += 1
        self._stepped()

    def _refused(self, problem: str) -> None:
        self._leave(problem)

    def _stepped(self) -> None:
        start = time.perf_counter()
        self._progress.num_steps += 1
        delay = self._rhythm.delay
        while self._under_way and self._num_steps - self._launched_at(0) >= delay:
            self._end_oldest(is_late=True)
        for index in self._rhythm.begin(self._num_steps):
            self._begin(index)
            if delay == 0:
                self._end_oldest()
        if self._invited:  # last, as its first step is the next one
            self._let_in()
        self._seconds += time.perf_counter() - start

    def _launched_at(self, place: int) -> int:
        """Return after how many steps a meeting that is under way began."""
        launched = self._under_way[place][1].launched
        assert launched is not None
        return launched

    def _begin(self, index: int) -> None:
        self._num_launched += 1
        fragment = self._fragments[index]
        self._under_way.append((self._num_launched, fragment))
        report, steps = self._loop.report(), self._num_steps
        check = MeetingCheck(self._weight, self._num_launched, index, steps, self._num_skipped, self._is_new, report)
        fragment.launch(
            lambda communicator: check.compare(communicator, self.world),
            self._weight,
            steps,
            functools.partial(self._commit, self._num_launched),
        )

    def _commit(self, number: int) -> None:
        """Count that meeting, once all ranks have its mean; on the communication thread."""
        if self._group is not None:
            self._invitations[number] = self._group.commit()
        self._num_committed = number

    def _end_oldest(self, *, is_late: bool = False) -> None:
        """End the oldest meeting that is under way."""
        number, fragment = self._under_way[0]
        try:
            self._receive(fragment)
        finally:
            del self._under_way[0]
        fragment.land(is_late=is_late)
        if not is_late:
            fragment.met_at = self._num_steps
        self._num_meetings += 1
        self._invited = self._invitations.pop(number, 0) or self._invited

    def _receive(self, fragment: Fragment) -> None:
        while True:
            try:
                fragment.receive()
                return
            except CommError as error:
                self._go_on_after(_in_meeting(error, self._num_steps))

    def _go_on_after(self, error: CommError) -> None:
        """Go on among the remaining ranks, and repeat the meetings that did not count; or raise ``error``."""
        if self._group is None:
            raise error

        def catch_up(committed: int) -> None:
            for number, fragment in self._under_way:
                if number <= committed and not fragment.has_mean:
                    fragment.take_mean()

        self._num_committed = self._group.recover(error, self._num_committed, catch_up)
        self._move()

    def _move(self) -> None:
        for fragment in self._fragments:
            fragment.move(self._communicator)
        for number, fragment in self._under_way:
            if not fragment.has_mean:
                fragment.launch_again(functools.partial(self._commit, number))

    # Newcomers.

    def _let_in(self) -> None:
        number, self._invited = self._invited, 0
        for _, fragment in self._under_way:  # their meetings are with those that were there
            self._receive(fragment)
        assert self._group is not None
        try:
            self._group.let_in(number)
            self._move()
            self.share_state(is_newcomer=False)
        except CommError as error:
            self._go_on_after(error)

    @torch.no_grad()
    def share_state(self, *, is_newcomer: bool) -> None:
        """Give a newcomer what the others have. Collective, with it; every meeting under way has its mean."""
        mine = json.dumps(self._counters()).encode() if self._communicator.rank == 0 else b""
        counters = json.loads(self._communicator.channel.all_gather_bytes(mine)[0])
        if is_newcomer:
            self._resume(counters)
            self._is_new = True
        for fragment in self._fragments:
            broadcast_tensors(self._communicator, fragment.shared(), src=0)
            if is_newcomer:
                fragment.go_to_anchor()
        buffers = shared_parts(self._buffers)
        broadcast_tensors(self._communicator, buffers if is_newcomer else [b.clone() for b in buffers], src=0)

    def _counters(self) -> dict[str, Any]:
        places = [[number, self._fragments.index(fragment)] for number, fragment in self._under_way]
        return {
            "steps": self._num_steps,
            "launched": self._num_launched,
            "under_way": places,
            "fragments": [[fragment.launched, fragment.num_meetings] for fragment in self._fragments],
        }

    def _resume(self, counters: dict[str, Any]) -> None:
        """Go on from the counters of another rank, or of an earlier run, whose meetings under way have their means."""
        self._loop.excuse()  # what it has counted is not from this meeting to the next
        self._progress.num_steps, self._num_launched = counters["steps"], counters["launched"]
        self._num_committed = self._num_launched
        self._under_way = [(number, self._fragments[index]) for number, index in counters["under_way"]]
        for fragment, (launched, num_meetings) in zip(self._fragments, counters["fragments"], strict=True):
            fragment.resume(launched, num_meetings)

    # What users call.

    def meet(self) -> None:
        """Let all fragments meet now that have not met since the last step: at the end of training. Collective."""
        self._require_attached()
        start = time.perf_counter()
        while self._under_way:
            self._end_oldest(is_late=True)
        for index, fragment in enumerate(self._fragments):
            if fragment.met_at != self._num_steps:  # else momentum would move it once more, by no new step
                self._begin(index)
                self._end_oldest()
        self._seconds += time.perf_counter() - start

    def take_center(self) -> None:
        """Make what the ranks have in common the parameters of all: the center, or those after the last meeting."""
        self._require_attached()
        for fragment in self._fragments:
            fragment.go_to_anchor()

    def stats(self) -> dict[str, Any]:
        """Return ``steps``, ``meetings`` (of fragments), ``bytes_sent`` and ``wait_seconds``, those in meetings.

        ``skipped`` of the steps were left out, by a loss scaler or :meth:`skip_step`.
        With "shrink" also ``changes``, a dict for each change of the ranks. It has ``world``, the ranks after it; and
        either ``joined``, the new rank, or ``left``, the fates of lost ranks, with ``seconds``, the time it took.
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
        """Return counters, and by parameter what it was at its last meeting, the outer velocity and residuals.

        Equal on all ranks, but for the residuals of compression. Waits for meetings that are under way. It loads with
        ``torch.load(weights_only=True)``.
        """
        self._require_attached()
        for _, fragment in self._under_way:
            self._receive(fragment)
        return {"format": _FORMAT, "counters": self._counters(), **copied(self._state())}

    def _state(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for fragment in self._fragments:
            for what, entries in fragment.state().items():
                found.setdefault(what, {}).update(entries)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned. The parameters stay as they are: load the model's own state.

        Raises:
            ValueError: it is of other parameters, or was saved with other settings; nothing is changed then.
        """
        self._require_attached()
        _check_state(state, self._state(), self._fragments)
        self._resume(state["counters"])
        for fragment in self._fragments:
            fragment.load_state(state)

    def _release(self) -> None:
        self._leave(f"it has ended its training (detach) after step {self._num_steps}")

    def _leave(self, reason: str) -> None:
        if self._group is not None:
            self._group.close(reason)
        self._communicator.close(reason)
        self._finalizer.detach()


def _in_meeting(error: CommError, num_steps: int) -> CommError:
    """Return ``error`` with the meeting that it ended."""
    waits = f"{error} (rank {error.rank} waits in the meeting after step {num_steps})"
    made = CommError(waits, rank=error.rank, peer=error.peer, operation=error.operation, elapsed=error.elapsed)
    made.__cause__ = error.__cause__
    return made


def _check_state(state: dict[str, Any], current: dict[str, Any], fragments: Sequence[Fragment]) -> None:
    """Raise ValueError if ``state`` cannot be loaded where there is ``current``."""
    wanted = {"format", "counters", *current}
    if not isinstance(state, dict) or state.keys() != wanted or state["format"] != _FORMAT:
        raise ValueError("state is not a LocalAverager.state_dict()")
    for what in ("anchors", "velocities"):
        if {n: t.shape for n, t in state[what].items()} != {n: t.shape for n, t in current[what].items()}:
            raise ValueError(f"state[{what!r}] is of other parameters, or of another outer optimizer")
    if state["compression"].keys() != current["compression"].keys():
        raise ValueError("state['compression'] is of another compression")
    number = len(state["counters"]["fragments"])
    if number != len(fragments):
        raise ValueError(f"state is of {number} fragments, not {len(fragments)}")
    under_way = [fragments[index] for _, index in state["counters"]["under_way"]]
    if state["means"].keys() != {name for fragment in under_way for name in fragment.names}:
        raise ValueError("state lacks what meetings that were under way have come to")
