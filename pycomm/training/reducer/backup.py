"""Steps that go on without the slowest ranks, whose gradients come one step later (``pycomm.Survive(backup=b)``).

Synchronous SGD with backup workers (Chen et al., "Revisiting Distributed Synchronous SGD", 2016) drops what
the slowest ranks have computed. Here it is kept, and added to what the same rank contributes next.

After each ``optimizer.step()`` a standby job runs on the communication thread. It sends buckets as backward launches
them. Once all ranks but b have all their gradients, and this one has not, the job sends the remaining buckets without
this rank's gradients. Their results go into new memory, as autograd and the user may still use the old one, and the
main thread finds them there when its backward ends. Ranks need not agree on who is late: each one decides for itself,
and a rank that was counted as ready is never late.

A late rank starts the next standby job only after its own step, so that it is at most one step behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.gpu import GpuWork
from pycomm.compression.base import State
from pycomm.errors import CommError
from pycomm.training.reducer.buckets import BucketInFlight, Slot
from pycomm.training.reducer.engine import Engine, Grads, Launch
from pycomm.training.reducer.surviving import Survival, SurvivingPolicy
from pycomm.worker import Work

_POLL = 0.002
"""Shortest interval between two polls of the ready count, in seconds: on several hosts a poll is a message."""
_POLL_PART = 0.05
"""Poll interval as a part of the time waited so far; it bounds the delay that polling adds."""
_LONGEST_POLL = 0.1  # seconds

_LATE = "late"
"""Key of late gradients in saved state."""


class StandbyJob:
    """Job that runs the works of one step as they are added, and adds missing ones itself if this rank is late.

    Args:
        is_enough: returns whether enough other ranks are ready.
        substitute: adds all missing works. Called at most once, with ``turn`` held.

    Attributes:
        turn: lock for adding works, and for reading :attr:`is_late`.
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
        """End the job if no work was added; return whether none was."""
        with self.turn:
            if not self._has_begun:
                self.complete()
            return not self._has_begun

    def run(self) -> None:
        while (work := self._next()) is not None:
            work.run()

    def end(self) -> None:
        """Run the works that :meth:`run` has left if it failed or was never called; not in a forked child."""
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


class LateGradients:
    """Gradients of this rank that were late for one step and are added to the next one."""

    def __init__(self) -> None:
        self._absent: list[Slot] = []  # whose gradients are late for this step
        self._pending: dict[Slot, torch.Tensor] = {}  # those gradients, from their arrival to the hand-out
        self._carried: dict[Slot, torch.Tensor] = {}  # late gradients of the step before
        self.num_steps = 0  # number of steps with late gradients

    def miss(self, slots: list[Slot]) -> None:
        """Note that the gradients of ``slots`` are late for this step."""
        self._absent = slots

    def collect(self) -> None:
        """Keep the late gradients of this step, which have arrived now."""
        for slot in self._absent:
            if slot.owner.grad is not None:
                self._pending[slot] = slot.owner.grad.detach()
        self.num_steps += bool(self._absent)

    def add(self, flight: BucketInFlight, grads: Grads, weight: float) -> Grads:
        """Return ``grads``, of ``weight`` in the average, plus the late gradients of the step before."""
        sent = list(grads)
        for i, slot in enumerate(flight.slots):
            if slot in self._carried:
                late, grad = self._carried[slot] / weight, sent[i]
                sent[i] = (late if grad is None else grad + late).to(slot.local.dtype)
        return sent

    def carry(self, weight: float) -> None:
        """Carry the late gradients of this step, of ``weight`` in the average, to the next one."""
        self._carried = {  # half precision in float32, as the product may not be representable
            slot: (grad.float() if grad.dtype.itemsize < 4 else grad) * weight for slot, grad in self._pending.items()
        }

    def end(self) -> None:
        self._absent, self._pending = [], {}

    def save(self, state: State, slots: list[Slot]) -> None:
        for slot in slots:
            late = self._carried.get(slot)
            state[slot.name] = {
                **state.get(slot.name, {}),
                _LATE: torch.zeros_like(slot.local, requires_grad=False) if late is None else late,
            }

    def load(self, state: State, slots: list[Slot]) -> State:
        """Take back what :meth:`save` added to ``state``; return the rest."""
        self._carried = {
            slot: state[slot.name][_LATE].to(slot.local.device, copy=True)
            for slot in slots
            if _LATE in state.get(slot.name, {}) and bool(state[slot.name][_LATE].any())
        }
        others = {name: {k: t for k, t in entry.items() if k != _LATE} for name, entry in state.items()}
        return {name: entry for name, entry in others.items() if entry}


def _standby_job(policy: weakref.ref[BackupPolicy], survival: Survival, engine: Engine, steps: int) -> StandbyJob:
    """Return the standby job of the step after ``steps``. It keeps neither the policy nor the engine alive."""
    num_awaited = max(engine.communicator.size - engine.settings.backup, 1)
    ready, worker = survival.membership.ready, engine.communicator.channel.worker
    assert ready is not None

    def is_enough() -> bool:
        try:
            return ready.num_ready(steps) >= num_awaited
        except CommError:  # without the store all ranks are waited for; a later use of it raises
            return False

    def substitute() -> None:
        present = policy()
        if present is not None:
            present.survival.run_or_leave(present.go_without)

    return StandbyJob(is_enough, substitute, lambda: worker.is_stopped)


class BackupPolicy(SurvivingPolicy):
    """Policy of ranks that do not wait for the slowest ones."""

    def __init__(self, survival: Survival) -> None:
        super().__init__(survival)
        self._standby: StandbyJob | None = None
        self._late = LateGradients()
        self.lets_count = False  # as another thread may launch, too

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Keep the other thread from launching inside; yield whether this step was launched without this rank."""
        standby = self._standby
        with contextlib.nullcontext() if standby is None else standby.turn:
            yield self._is_idle or (standby is not None and standby.is_late)

    def stand_by(self) -> None:
        """Start the standby job of the next step, unless all ranks must communicate first.

        Steps that compare replicas wait for all ranks: parameters may be written to until a rank's next forward.
        """
        engine, steps, size = self.engine, self.engine.progress.num_reductions, self.engine.communicator.size
        is_due = engine.comparison.is_due(steps)
        if self._standby is not None or size == 1 or steps == 0 or is_due or self.survival.invited != 0:
            return
        engine.window.fix_scales(with_next=True, step=engine.outcome.committed_steps)
        engine.forget_launched()
        self._standby = standby = _standby_job(weakref.ref(self), self.survival, engine, steps)
        engine.communicator.channel.submit(standby.run).when_done(standby.end)

    def stand_down(self) -> None:
        """Cancel the standby job, unless this step is under way."""
        if self._standby is not None and self._standby.cancel():
            self._standby = None

    def leave(self, reason: str) -> None:
        """Announce that this rank no longer takes part, and end the standby job."""
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.complete()  # no more works will be added
        super().leave(reason)

    def go_without(self) -> None:
        """Launch the missing buckets without gradients. Called on the communication thread."""
        self._late.miss(self.engine.launch_without())
        self.launch_commit()

    def admit_newcomer(self) -> None:
        """Admit a newcomer, unless the present step's own commit has announced it before this rank's pass."""
        if self._standby is None:
            super().admit_newcomer()

    def launching(self, flight: BucketInFlight) -> None:
        """Count this rank as ready when it launches the last bucket."""
        engine, ready = self.engine, self.survival.membership.ready
        if engine.num_launched + 1 == len(engine.table.flights) and ready is not None and not self._is_idle:
            with contextlib.suppress(CommError):  # the others wait for this rank then
                ready.add(engine.progress.num_reductions)
        super().launching(flight)

    def launch_commit(self) -> None:
        """Launch the exchange that ends the step, the last work of the standby job."""
        super().launch_commit()
        if self._standby is not None:
            self._standby.complete()

    def submit(self, job: Callable[[], None], launch: Launch) -> Work | GpuWork:
        """Add ``job`` to the standby job, if there is one; else launch it."""
        if self._standby is not None:
            work = self._standby.add(functools.partial(self.survival.run_or_leave, job))
            if work is not None:
                return work
        return super().submit(job, launch)

    def receive(self) -> Mapping[int, float]:
        """Wait for all results and hand them out; keep this step's late gradients."""
        self._late.collect()
        return super().receive()

    def ended(self) -> None:
        super().ended()
        self.lets_count = False
        self._standby = None
        self._late.end()

    def contributed(self, flight: BucketInFlight, grads: Grads) -> Grads:
        """Keep ``grads``; return them plus the late gradients of the step before."""
        return self._late.add(flight, super().contributed(flight, grads), self.engine.window.scaling.weight)

    def hand_out(self) -> None:
        """Hand out the averages; carry late gradients to the next step."""
        super().hand_out()
        self._late.carry(self.engine.window.scaling.weight)  # only known now, as ranks may have been lost since

    def continue_over(self, lanes: Sequence[Communicator]) -> None:
        """Continue over ``lanes``, without the standby job, whose works have failed."""
        self._standby = None
        super().continue_over(lanes)

    def save(self, state: State) -> None:
        self._late.save(state, self.engine.table.slots())

    def load(self, state: State) -> State:
        """Take late gradients from ``state``; return the rest. RuntimeError if the next step has begun elsewhere."""
        self.stand_down()
        if self._standby is not None:
            raise RuntimeError(
                "load_state_dict() after the next step has begun without this rank (backup): call it before the first "
                "step, or between backward() and optimizer.step()"
            )
        return self._late.load(state, self.engine.table.slots())

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "late": self._late.num_steps}
