"""Steps that go on without the slowest ranks, whose gradients come one step later (``attach(..., backup=b)``).

Synchronous SGD with backup workers (Chen et al., "Revisiting Distributed Synchronous SGD", 2016) drops what
the slowest ranks have computed. Here it is kept, and added to what the same rank contributes next.

After each ``optimizer.step()`` a job stands by on the communication thread. It sends buckets as backward
launches them. Once all ranks but b are known to have all their gradients, and this one has not, it takes part with
what it has: the remaining buckets go without this rank's gradients, into new memory, as autograd and the user may
still use the old one. The main thread finds the averages there when its own backward ends. Nobody needs to agree
on who is late: each rank judges itself, and those that the others have counted never do.

A rank that is late stands by again only after its own step, so that it is one step behind at most.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import State
from pycomm.errors import CommError
from pycomm.reducer.buckets import BucketInFlight, Slot
from pycomm.reducer.surviving import SurvivingEngine
from pycomm.transport.gpu import GpuWork
from pycomm.worker import Work

_POLL = 0.002
"""Seconds from one look at who is ready to the next, at least: on several hosts each look is a message."""
_POLL_PART = 0.05
"""Part of the time waited so far after which it looks again: what a late rank costs the others at most, besides."""
_LONGEST_POLL = 0.1  # seconds

_LATE = "late"
"""Key of late gradients in saved state."""


class Standin:
    """Job that runs the works of one step as they are added, and may go on by itself before they are.

    Args:
        is_enough: returns whether the other ranks need not wait for this one any more.
        substitute: adds all works that are missing. Called once at most, with ``turn`` held.
        is_stopped: returns whether nothing will be added any more.

    Attributes:
        turn: held by whoever adds works, or looks whether this has gone on by itself.
        is_late: whether ``substitute`` has been called.
    """

    def __init__(
        self, is_enough: Callable[[], bool], substitute: Callable[[], None], is_stopped: Callable[[], bool]
    ) -> None:
        self._is_enough, self._substitute, self._is_stopped = is_enough, substitute, is_stopped
        self.turn = threading.Condition(threading.RLock())
        self.is_late = False
        self._works: deque[Work] = deque()
        self._has_begun = self._is_over = False
        self._pid = os.getpid()

    def add(self, job: Callable[[], Any]) -> Work | None:
        """Add ``job`` to the works; ``None`` if they are complete."""
        with self.turn:
            if self._is_over:
                return None
            work = Work(job)
            self._works.append(work)
            self._has_begun = True
            self.turn.notify()
            return work

    def complete(self) -> None:
        """Note that all works have been added."""
        with self.turn:
            self._is_over = True
            self.turn.notify()

    def cancel(self) -> bool:
        """End before anything was added; return whether nothing was."""
        with self.turn:
            if not self._has_begun:
                self.complete()
            return not self._has_begun

    def run(self) -> None:
        """Run the works until they are complete."""
        while (work := self._next()) is not None:
            work.run()

    def end(self) -> None:
        """Run what :meth:`run` has left, if it failed or was never called; not in a forked child, whose parent does."""
        if os.getpid() == self._pid:
            self.complete()
            self.run()

    def _next(self) -> Work | None:
        start = time.monotonic()
        while True:
            with self.turn:
                if not self._works and not self._is_over:
                    waited = time.monotonic() - start
                    self.turn.wait(min(max(_POLL, _POLL_PART * waited), _LONGEST_POLL))
                if self._works:
                    return self._works.popleft()
                if self._is_over or self._is_stopped():
                    self._is_over = True
                    return None
            if not self._is_enough():
                continue
            with self.turn:
                if not self._works and not self._is_over:
                    self.is_late = True
                    self._substitute()


class BackupEngine(SurvivingEngine):
    """Engine whose steps do not wait for the slowest ranks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._standin: Standin | None = None
        self._absent: list[Slot] = []  # whose gradients come too late for this step
        self._pending: dict[Slot, torch.Tensor] = {}  # those gradients, once they are there: until averages are
        self._carried: dict[Slot, torch.Tensor] = {}  # those of the step before, which this one contributes
        self._num_late = 0

    # On either thread, in turns.

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Hold the turn; yield whether this step goes on without this rank."""
        standin = self._standin
        with contextlib.nullcontext() if standin is None else standin.turn:
            yield standin is not None and standin.is_late

    def stand_in(self) -> None:
        """Have the next step go on without this rank if it is late; not if all ranks have something else to do first.

        Steps that compare the replicas wait for all: a rank's parameters may be written to until its next forward.
        """
        steps, size = self.progress.num_reductions, self.communicator.size
        is_due = self.comparison.replicas.is_due(steps)
        if self._standin is not None or size == 1 or steps == 0 or is_due or self.survival.invited != 0:
            return
        self.window.fix_scales(with_next=True, step=self.outcome.committed_steps)
        self._num_launched = 0
        num_awaited = max(size - self.settings.backup, 1)
        ready, worker = self.survival.membership.ready, self.communicator.channel.worker
        assert ready is not None

        def is_enough() -> bool:
            try:
                return ready.num_ready(steps) >= num_awaited
            except CommError:  # without the store all are waited for, and its absence is named when it is needed
                return False

        this = weakref.ref(self)  # else a job that stands by would keep alive what nobody else does any more

        def substitute() -> None:
            engine = this()
            if engine is not None:
                engine._run_or_leave(engine._go_without)

        self._standin = standin = Standin(is_enough, substitute, lambda: worker.is_stopped)
        self.communicator.channel.submit(standin.run).when_done(standin.end)

    def stand_down(self) -> None:
        """Let other operations come first, unless this step is under way."""
        if self._standin is not None and self._standin.cancel():
            self._standin = None

    def give_up(self) -> None:
        """Have the job that stands by end with what it has been given: nothing will be added."""
        standin, self._standin = self._standin, None
        if standin is not None:
            standin.complete()

    def _go_without(self) -> None:
        """Launch what is missing without gradients, on the communication thread."""
        first = self._num_launched
        flights = self.table.flights[first:]
        for flight in flights:
            flight.bucket.renew()
        for number, flight in enumerate(flights, first + 1):
            job = self._exchange_of(flight, [None] * len(flight.slots), number)
            flight.work = self._submit(self.communicator, job, [], set())
        self._num_launched = len(self.table.flights)
        self._absent = [slot for flight in flights for slot in flight.slots]
        self._launch_commit()

    # A step.

    def open_door(self) -> None:
        """Let in a newcomer, unless it is the present step's commit that has announced it, before this rank's pass."""
        if self._standin is None:
            super().open_door()

    def has_launched(self) -> bool:
        """Return whether some of this pass's gradients have been sent; a step without any of them is none of it."""
        with self._turn():
            return super().has_launched() and len(self._absent) < len(self.table.slots())

    def begin_pass(self, *, with_next: bool | None = True) -> None:
        """Prepare for this pass's gradients, which may be late already."""
        with self._turn() as is_late:
            if not is_late:
                super().begin_pass(with_next=with_next)
                return
            for flight in self.table.flights:
                flight.counts.begin_pass()

    def take(self, slot: Slot) -> None:
        """Note that the gradient of ``slot`` has been accumulated; launch what is ready, unless it is too late."""
        with self._turn() as is_late:
            if is_late:
                slot.fire()
            else:
                super().take(slot)

    def may_count(self) -> bool:
        """Return whether hooks may count by themselves: never, as another thread launches too."""
        return False

    def launch_rest(self) -> None:
        """Launch the remaining buckets, in order, and the commit after them, unless that has been done."""
        with self._turn():
            super().launch_rest()

    def _launch(self, flight: BucketInFlight, grads: list[torch.Tensor | None] | None = None) -> None:
        ready = self.survival.membership.ready
        if self._num_launched + 1 == len(self.table.flights) and ready is not None and not self._is_idle:
            with contextlib.suppress(CommError):  # they wait for this rank then
                ready.answer(self.progress.num_reductions)
        super()._launch(flight, grads)

    def _launch_commit(self) -> None:
        super()._launch_commit()
        if self._standin is not None:
            self._standin.complete()

    def _submit(self, communicator: Communicator, job: Callable[[], None], *rest: Any, **named: Any) -> Work | GpuWork:
        if self._standin is not None:
            work = self._standin.add(functools.partial(self._run_or_leave, job))
            if work is not None:
                return work
        return super()._submit(communicator, job, *rest, **named)

    def reduce(self) -> None:
        """Wait for the averages, and hand them out; keep the gradients that came too late for them."""
        self.launch_rest()
        for slot in self._absent:
            if slot.owner.grad is not None:
                self._pending[slot] = slot.owner.grad.detach()
        self._num_late += bool(self._absent)
        try:
            super().reduce()
        finally:
            self._standin, self._absent, self._pending = None, [], {}

    def _complete(self, flight: BucketInFlight, grads: list[torch.Tensor | None]) -> None:
        """Add the gradients that were too late for the step before to ``grads``."""
        for i, slot in enumerate(flight.slots):
            if slot not in self._carried:
                continue
            late = self._carried[slot] / self.window.scaling.weight
            grad = grads[i]
            grads[i] = (late if grad is None else grad + late).to(slot.local.dtype)

    def _hand_out(self) -> None:
        super()._hand_out()
        weight = self.window.scaling.weight  # only known now, as ranks may have been lost since
        self._carried = {  # of half types in float32, as its share may not be a number of them
            slot: (grad.float() if grad.dtype.itemsize < 4 else grad) * weight for slot, grad in self._pending.items()
        }

    def _go_on(self, lanes: Sequence[Communicator]) -> None:
        self._standin = None  # all that it had to run has failed
        super()._go_on(lanes)

    def release(self) -> None:
        """Let go of memory that is not this object's, and of the job that stands by."""
        self.stand_down()
        super().release()

    # What is carried to the next step.

    def state(self) -> State:
        """Return what this rank carries, its late gradients among it as their contribution to the average."""
        state = super().state()
        for slot in self.table.slots():
            late = self._carried.get(slot)
            state[slot.name] = {
                **state.get(slot.name, {}),
                _LATE: torch.zeros_like(slot.local, requires_grad=False) if late is None else late,
            }
        return state

    def load_state(self, state: State, num_steps: int) -> None:
        """Load what :meth:`state` has returned.

        Raises:
            RuntimeError: the next step has begun on other ranks.
        """
        self.stand_down()
        if self._standin is not None:
            raise RuntimeError(
                "load_state_dict() after the next step has begun without this rank (backup): call it before the first "
                "step, or between backward() and optimizer.step()"
            )
        self._carried = {
            slot: state[slot.name][_LATE].to(slot.local.device, copy=True)
            for slot in self.table.slots()
            if _LATE in state.get(slot.name, {}) and bool(state[slot.name][_LATE].any())
        }
        others = {name: {k: t for k, t in entry.items() if k != _LATE} for name, entry in state.items()}
        super().load_state({name: entry for name, entry in others.items() if entry}, num_steps)

    def stats(self) -> dict[str, Any]:
        """Return the counters of ``Reducer.stats``, and in how many steps this rank was late."""
        return {**super().stats(), "late": self._num_late}
