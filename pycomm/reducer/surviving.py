"""Steps that go on when ranks are lost, and when others come (``attach(..., on_failure="shrink")``).

Each step ends with an exchange, the commit, after which every rank is known to have all results; only then are they
handed out. If an operation fails, the ranks that are left reduce the step again, from the gradients that backward made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pycomm.communicator import Communicator
from pycomm.errors import CommError
from pycomm.reducer.buckets import BucketInFlight
from pycomm.reducer.engine import Grads, Launch, StepPolicy
from pycomm.reducer.newcomers import Carried
from pycomm.reducer.survival import Survival
from pycomm.transport.gpu import GpuWork
from pycomm.worker import Work


class SurvivingPolicy(StepPolicy):
    """Policy of ranks that go on without those that are lost, and with newcomers; ``survival`` has them meet again."""

    survives = True

    def __init__(self, survival: Survival) -> None:
        self.survival = survival
        self._commit_work: Work | GpuWork | None = None
        self._is_idle = False  # whether this step was launched without gradients, before its passes

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that take part, by the numbers that they got when they came."""
        return self.survival.membership.world

    def turn(self) -> AbstractContextManager[bool]:
        """Yield whether this step has been launched without this rank's gradients."""
        return nullcontext(self._is_idle)

    def launching(self, flight: BucketInFlight) -> None:
        """Forget what was kept of the last step; if all went at its end, autograd would touch new pages each time."""
        for slot in flight.slots:
            slot.kept = None

    def contributed(self, flight: BucketInFlight, grads: Grads) -> Grads:
        """Keep ``grads``, and return them."""
        self.survival.keep(flight, grads)
        return grads

    def launched(self) -> None:
        """Launch the commit after the last bucket."""
        if self._commit_work is None:
            self.launch_commit()

    def launch_commit(self) -> None:
        """Launch the exchange that ends the step."""
        self._commit_work = self.engine.submit(self.engine.communicator, self._commit_job())

    def _commit_job(self) -> Callable[[], None]:
        engine, works = self.engine, self.engine.works()

        def job() -> None:
            for work in works:
                work.wait()  # at once, but for those of other lanes; raises if it failed
            engine.outcome.share_source()  # before the commit: a rank may be lost in it
            is_known = not self._is_idle and not engine.table.on_gpu  # there the host runs ahead of the gradients
            self.survival.commit(engine.statistics.waits.microseconds_here() if is_known else 0)

        return job

    def submit(self, job: Callable[[], None], launch: Launch) -> Work | GpuWork:
        """Have ``job`` run by ``launch``; this rank leaves if it fails."""
        return launch(functools.partial(self.survival.run_or_leave, job))

    def receive(self) -> Mapping[int, float]:
        """Wait for all results and hand them out; reduce the step again if ranks are lost meanwhile."""
        engine = self.engine
        while True:
            try:
                engine.await_all(self._wait)
            except CommError as error:
                if not self.recover(error):
                    self._launch_again()
                    continue
            else:
                self.hand_out()
            self.survival.forget_newcomers()
            engine.window.num_idle = 0
            return self.survival.take_arrivals()

    def _wait(self) -> None:
        assert self._commit_work is not None
        self._commit_work.wait()

    def hand_out(self) -> None:
        """Hand out the averages."""
        self.engine.hand_out()

    def ended(self) -> None:
        """Forget the step, which has been handed out or has failed."""
        self._commit_work = None
        if self._is_idle:
            self._is_idle, self.lets_count = False, True
            self.engine.window.weights.forget_passes()

    # Losing ranks.

    def recover(self, error: CommError) -> bool:
        """Go on among the ranks that are left; return whether they count this step, which has been handed out then."""
        engine = self.engine
        works = [*engine.works(), self._commit_work]
        was_complete, lanes = self.survival.recover(error, engine.progress.num_reductions, self.hand_out)
        self.go_on(lanes)
        for work in works:
            if isinstance(work, Work):
                work.forget_trace()  # else the memory of the old world would stay mapped until it is collected
        return was_complete

    def go_on(self, lanes: Sequence[Communicator]) -> None:
        """Go on over ``lanes``, whose ranks are those of the new world."""
        self.engine.window.num_idle = self.survival.num_newcomers()
        self._commit_work = None
        self.engine.restart(lanes)

    def _launch_again(self) -> None:
        """Launch all buckets with what was kept of their gradients."""
        engine = self.engine
        if engine.window.weights.in_use:
            engine.window.weights.sum_again()
        if engine.buffers is not None:
            engine.buffers.restore()
        for flight in engine.table.flights:
            engine.launch(flight, self.survival.kept(flight))
        engine.launch_rest()

    def admit_newcomer(self) -> None:
        """Let in the newcomer that the last commit has announced, if any. Collective then; between two steps."""
        if self.survival.invited == 0:
            return
        try:
            self.go_on(self.survival.let_in(Carried.of(self.engine, self.survival.carry)))
        except (RuntimeError, ValueError) as error:  # CommError is the former, and so is what the store raises
            what = f"the newcomer was not let in: {error}"
            self.recover(CommError.during("join", what, rank=self.engine.communicator.rank))

    def enter(self) -> None:
        """Take part in the present step without gradients, as a newcomer does, whose first pass only gets averages."""
        engine = self.engine
        engine.expect_gradients()
        engine.flags.has_pass = False
        engine.window.num_idle = self.survival.num_newcomers()
        engine.window.fix_scales(with_next=True, step=engine.outcome.committed_steps)
        self._is_idle, self.lets_count = True, False
        for flight in engine.table.flights:
            engine.launch(flight, [None] * len(flight.slots))
        engine.launch_rest()

    def leave(self, reason: str) -> None:
        """Tell the others that this rank takes part no more."""
        self.survival.leave(reason)

    def close(self, reason: str) -> None:
        """Leave, and release what the agreement needs."""
        self.survival.close(reason)

    def stats(self) -> dict[str, Any]:
        """Return what happened to the world."""
        return self.survival.stats()
