"""Engine that goes on when ranks are lost, and when others come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.errors import CommError
from pycomm.reducer.buckets import BucketInFlight, Slot
from pycomm.reducer.damage import DamageError
from pycomm.reducer.engine import Engine
from pycomm.reducer.newcomers import Carried
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.settings import Settings
from pycomm.reducer.survival import Survival
from pycomm.transport.gpu import GpuWork
from pycomm.worker import Work


class SurvivingEngine(Engine):
    """Engine whose steps are whole: all ranks have the averages before any of them hands them out.

    Each step ends with an exchange, the commit, after which every rank is known to have all results. If an operation
    fails, the ranks that are left reduce the step again, from the gradients that backward has made.
    """

    survival: Survival

    def __init__(
        self, table: ParameterTable, lanes: Sequence[Communicator], settings: Settings, survival: Survival
    ) -> None:
        super().__init__(table, lanes, settings)
        self.survival = survival
        self.flags.takes_new = False  # what is launched after a step's commit would not be part of it
        self.flags.compares_loop = self.comparison.replicas.looks_soon = settings.backup == 0
        self._commit_work: Work | GpuWork | None = None
        self._is_idle = False  # whether this step was launched without gradients, before its passes

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that take part, by the numbers that they got when they came."""
        return self.survival.membership.world

    # A step, with its gradients kept.

    def begin_pass(self, *, with_next: bool | None = True) -> None:
        """Prepare for this pass's gradients, unless the step has been launched without them."""
        if not self._is_idle:
            super().begin_pass(with_next=with_next)

    def take(self, slot: Slot) -> None:
        """Note that the gradient of ``slot`` has been accumulated; see :meth:`Engine.take`."""
        if self._is_idle:
            slot.fire()
        else:
            super().take(slot)

    def may_count(self) -> bool:
        """Return whether hooks may count by themselves; see :meth:`Engine.may_count`."""
        return not self._is_idle and super().may_count()

    def _launch(self, flight: BucketInFlight, grads: list[torch.Tensor | None] | None = None) -> None:
        # What was kept of the last step goes only now. If all went when that step ended, the allocator would give the
        # pages back, and autograd would touch new ones in every step.
        for slot in flight.slots:
            slot.kept = None
        super()._launch(flight, grads)

    def launch_rest(self) -> None:
        """Launch the remaining buckets, in order, and the commit after them."""
        if self.buffers is not None:
            self.buffers.keeps = True
        super().launch_rest()
        if self._commit_work is None:
            self._launch_commit()

    def _launch_commit(self) -> None:
        self._commit_work = self._submit(self.communicator, self._commit_job(), [], set())

    def _commit_job(self) -> Callable[[], None]:
        works = [flight.work for flight in self.table.flights] + [self._buffer_work]

        def job() -> None:
            for work in works:
                if work is not None:
                    work.wait()  # at once, but for those of other lanes; raises if it failed
            self.outcome.source.share(self.table.flights, self.communicator)  # before the commit: a rank may be lost
            is_known = not self._is_idle and not self.table.on_gpu  # there the host runs ahead of the gradients
            self.survival.commit(self.waits.microseconds_here() if is_known else 0)

        return job

    def _exchange_of(self, flight: BucketInFlight, grads: list[torch.Tensor | None], number: int) -> Callable[[], None]:
        sent = list(grads)
        exchange = super()._exchange_of(flight, sent, number)

        def job() -> None:
            self.survival.keep(flight, grads)
            self._complete(flight, sent)
            exchange()

        return job

    def _complete(self, flight: BucketInFlight, grads: list[torch.Tensor | None]) -> None:
        """Add to ``grads``, which are about to be sent, what else this rank has to contribute."""

    def _submit(self, communicator: Communicator, job: Callable[[], None], *rest: Any, **named: Any) -> Work | GpuWork:
        return super()._submit(communicator, functools.partial(self._run_or_leave, job), *rest, **named)

    def _run_or_leave(self, job: Callable[[], None]) -> None:
        """Run ``job``; leave if it fails by itself: the next one would send what the others take for this one's."""
        try:
            job()
        except (CommError, ValueError):  # the latter is raised by all ranks alike
            raise
        except BaseException as error:
            try:
                self.survival.leave(f"failed: {error}")
            finally:
                self.communicator.close(f"it failed: {error}")
            raise

    def reduce(self) -> None:
        """Launch the remaining buckets, wait for all, and hand out the averages; with the ranks that are left then."""
        try:
            super().reduce()
        finally:
            self._commit_work = None
            if self._is_idle:
                self._is_idle = False
                self.window.weights.forget_passes()
        self.survival.tell()

    def _receive(self) -> None:
        while True:
            try:
                self._await_all()
            except CommError as error:
                if not self.recover(error):
                    self._launch_again()
                    continue
            else:
                with self.phases.unpacking():
                    self._hand_out()
            self.survival.forget_newcomers()
            self.window.num_idle = 0
            return

    def _share_sources(self) -> None:
        """Do nothing: the commit has done it, as a rank may be lost in it."""

    def _await_results(self) -> None:
        super()._await_results()
        assert self._commit_work is not None
        self._commit_work.wait()

    # Losing ranks.

    def recover(self, error: CommError) -> bool:
        """Go on among the ranks that are left; return whether they count this step, which has been handed out then."""
        if isinstance(error, DamageError) and not error.spares(self.survival.membership.me):
            if error.ranks:
                self.survival.leave("is damaged")
                self.communicator.close(str(error))
            raise error
        works = [*(flight.work for flight in self.table.flights), self._buffer_work, self._commit_work]
        was_complete, lanes = self.survival.recover(error, self.progress.num_reductions, self._hand_out)
        self._go_on(lanes)
        for work in works:
            if isinstance(work, Work):
                work.forget_trace()  # else the memory of the old world would stay mapped until it is collected
        return was_complete

    def _go_on(self, lanes: Sequence[Communicator]) -> None:
        self.lanes = lanes
        self.window.num_idle = self.survival.num_newcomers()
        self.window.rescale()
        self._num_launched = 0
        self._buffer_work = self._commit_work = None
        self.hash_state()

    def _arrivals(self) -> Mapping[int, float]:
        arrivals, self.survival.arrivals = self.survival.arrivals, {}
        return arrivals

    def _compare_previous(self) -> None:
        try:
            super()._compare_previous()
        except DamageError as error:
            self.recover(error)

    def _launch_again(self) -> None:
        """Launch all buckets with what was kept of their gradients."""
        if self.window.weights.in_use:
            self.window.weights.sum_again()
        if self.buffers is not None:
            self.buffers.restore()
        for flight in self.table.flights:
            self._launch(flight, self.survival.kept(flight))
        self.launch_rest()

    # Gaining ranks.

    def open_door(self) -> None:
        """Let in the newcomer that the last commit has announced, if any. Collective then; between two steps."""
        if self.survival.invited == 0:
            return
        try:
            self._go_on(self.survival.let_in(self.carried()))
        except (RuntimeError, ValueError) as error:  # CommError is the former, and so is what the store raises
            what = f"the newcomer was not let in: {error}"
            self.recover(CommError.during("join", what, rank=self.communicator.rank))

    def carried(self) -> Carried:
        """Return what a newcomer gets besides parameters."""
        scaler, carry = self.settings.loss_scaler, self.survival.carry
        return Carried(self.table, self.progress, self.outcome.committed_steps, scaler, carry, self.window.weights)

    def enter(self) -> None:
        """Take part in the present step without gradients, as a newcomer does, whose first pass only gets averages."""
        self.expect_gradients()
        self.flags.has_pass = False
        self.window.num_idle = self.survival.num_newcomers()
        self.window.fix_scales(with_next=True, step=self.outcome.committed_steps)
        self._is_idle = True
        for flight in self.table.flights:
            self._launch(flight, [None] * len(flight.slots))
        self.launch_rest()

    # Questions from users.

    def stats(self) -> dict[str, Any]:
        """Return the counters of ``Reducer.stats``, and what happened to the world."""
        return {**super().stats(), **self.survival.stats()}
