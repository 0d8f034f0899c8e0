"""Engine of a Reducer: launches buckets while backward runs, waits for them, and hands them out as ``.grad``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pycomm.collectives.communicator import Communicator
from pycomm.collectives.gradients import PassGate
from pycomm.compression.base import State
from pycomm.errors import CommError, DamageError
from pycomm.torch_internals import current_graph_task
from pycomm.training.reducer.buckets import SentBucket, Slot, round_gradients, state_of
from pycomm.training.reducer.comparison import RankComparison
from pycomm.training.reducer.ledger import Ledger
from pycomm.training.reducer.module_buffers import BufferSync
from pycomm.training.reducer.outcome import ReductionOutcome
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.settings import Options
from pycomm.training.reducer.statistics import PhaseTimes, Statistics, Waits, trace_of
from pycomm.training.reducer.window import AccumulationWindow
from pycomm.training.reductions.phase import Role, StepState
from pycomm.training.reductions.reduction import Reduction
from pycomm.worker import Work

if TYPE_CHECKING:
    from pycomm.collectives.transport.gpu import GpuWork
    from pycomm.training.elastic.agreement_store import ReadyPage
    from pycomm.training.reducer.second_average import SecondAverage


class FixedMembers:
    """Ranks of an engine that stay the same. ``SurvivingMembers`` replaces what it calls where they may change.

    Attributes:
        survives: whether ranks may be lost and others may join.
    """

    survives = False

    def __init__(self, communicator: Communicator) -> None:
        self._world = tuple(range(communicator.size))

    @property
    def world(self) -> tuple[int, ...]:
        """Numbers of the ranks that take part, assigned when they joined."""
        return self._world

    # Launching.

    def submit(self, job: Callable[[], None], launch: Launch) -> Work | GpuWork:
        """Run ``job`` on the communication thread or stream, usually by ``launch``."""
        return launch(job)

    def launching(self, sent: SentBucket) -> None:
        """Called before the bucket ``sent`` is launched."""

    def launched(self, engine: Engine) -> None:
        """Called after the last bucket is launched."""

    def contributed(self, sent: SentBucket, grads: Grads) -> Grads:
        """Return the gradients to send for ``grads``. Called on the communication thread."""
        return grads

    # Receiving.

    def receive(self, engine: Engine, admit_new: Callable[[], None]) -> Mapping[int, float]:
        """Wait for all results and hand them out; return the known times at which ranks had all their gradients.

        ``admit_new``: see :meth:`Engine.await_all`.
        """
        engine.await_all(engine.share_source, admit_new)
        engine.hand_out()
        return engine.statistics.waits.arrivals()

    def ended(self, engine: Engine) -> None:
        """Called after the step has been handed out or has failed."""

    def recover(self, engine: Engine, error: CommError) -> bool:
        """Continue without lost ranks, and return whether the step has been handed out; otherwise raise ``error``."""
        raise error

    # Between two steps.

    def admit_newcomer(self, engine: Engine) -> None:
        """Admit a waiting newcomer."""

    def leave(self, reason: str) -> None:
        """Announce to the others that this rank no longer takes part."""

    def close(self, reason: str) -> None:
        """Leave, and release the records about the ranks."""

    def stats(self) -> dict[str, Any]:
        """Return further counters for ``Reducer.stats``."""
        return {}


_MOST_WAITING = 2
"""Number of launched buckets that may wait for the communication thread to pack them."""
Grads = list[torch.Tensor | None]
Launch: TypeAlias = "Callable[[Callable[[], None]], Work | GpuWork]"


class Engine:
    """Engine that sends the gradients of a window, bucket by bucket, in the same order on all ranks.

    To launch a bucket is to hand it to the communication thread, which packs and exchanges it. A bucket is launched
    once all its gradients have arrived and all buckets before it have been launched; a bucket with unused parameters,
    at the end of backward. The very first pass only counts how often each gradient is accumulated (several times if
    checkpointed pieces share a parameter), and launches at its end. On a GPU the communication thread is a stream, and
    the host waits only where this rank lacks a gradient that others may have.

    Attributes:
        lanes: communicators that buckets share; ``communicator`` is the first.
        step_state: phase and state of this rank's step.
        ledger: where gradients came from.
        reduction: reductions of the gradients, one after the other.
        callbacks: called with the old and the new world after a change.
        reported_world: the world of their last call.
        members: the ranks, which may change.
        buffers: synchronization of the module's buffers, if they are kept equal.
        comparison: what ranks compare in each reduction.

    Args:
        second: averages the first gradients once more, to compare.
    """

    def __init__(
        self,
        table: ParameterTable,
        lanes: Sequence[Communicator],
        settings: Options,
        members: FixedMembers,
        page: ReadyPage | None = None,
        second: SecondAverage | None = None,
    ) -> None:
        self.lanes, self.settings, self.communicator = lanes, settings, lanes[0]
        self.table = table
        self.members, self._second = members, second
        stream = self.communicator.channel.current_stream_of(table.device) if table.on_gpu else None
        state = StepState(table.device if table.on_gpu else None, PassGate(current_graph_task, stream))
        self.step_state = state
        self.ledger = Ledger(table, settings, state, self.communicator)
        self.reduction = Reduction(self.communicator, table.device, on_gpu=table.on_gpu)
        self.window = AccumulationWindow(self.communicator, settings, table.device, table.on_gpu, state, self.reduction)
        self.comparison = RankComparison(
            self.communicator, table, settings, state, self.window, self._compared_buffers, lambda: self.world
        )
        self.callbacks: list[Callable[[tuple[int, ...], tuple[int, ...]], None]] = []
        self.buffers: BufferSync | None = None
        module, keeps = table.module, members.survives
        if module is not None and settings.buffers != "local" and (self.communicator.size > 1 or keeps):
            # A rank that has joined would compare when the others do not. Without a GPU no host waits for another.
            interval = settings.tuning.check_replicas if table.on_gpu and not keeps else None
            self.buffers = BufferSync(
                module, settings.buffers, self.communicator, table.ignores, keeps=keeps, interval=interval
            )
        fingerprint = self.comparison.fingerprint
        self.outcome = ReductionOutcome(
            *(table, settings, fingerprint, state, self.reduction, self.ledger, self.communicator)
        )
        trace = trace_of(self.communicator.channel.recorder.global_rank, self.communicator.size)
        self.statistics = Statistics(Waits(page, self), PhaseTimes(trace))
        self._buffer_work: Work | GpuWork | None = None
        self.reported_world = self.world

    @property
    def world(self) -> tuple[int, ...]:
        return self.members.world

    def _compared_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [] if self.buffers is not None else self.table.named_buffers()  # synchronized only after the comparison

    def is_waited_for(self) -> bool:
        """Return whether any bucket has been launched, and not handed out."""
        return any(sent.work is not None for sent in self.table.buckets)

    # A pass.

    def begin_pass(self, *, with_next: bool | None = True) -> None:
        """Prepare the buckets for this pass's gradients; fix the scales if it is the last pass of its window.

        Args:
            with_next: whether another pass, with its samples, is part of it; ``None`` if the scales have been fixed.
        """
        if self.step_state.role is Role.NEW:
            for sent in self.table.buckets:
                sent.counts.begin_pass()
            return
        self.statistics.phases.begin()
        self.expect_gradients()
        if self.step_state.is_sending:
            self.comparison.require_suitable()
            try:
                self.comparison.fingerprint.receive_late()
            except DamageError as error:
                self.members.recover(self, error)
            if with_next is not None:
                self.window.fix_scales(with_next=with_next)
            self.window.fix_compared(is_flushed=not with_next)

    def expect_gradients(self) -> None:
        """Prepare the buckets for another pass's gradients."""
        self.step_state.expects_gradients()
        for sent in self.table.buckets:
            sent.begin_pass()

    def take(self, slot: Slot) -> None:
        """Note that the gradient of ``slot`` has been accumulated; launch the buckets that are ready."""
        if slot.is_undefined():
            return  # as if the parameter had not been used
        slot.fire()
        state = self.step_state
        if state.role is Role.NEW:
            return
        self.ledger.require_sendable(slot)
        sent = slot.sent
        assert sent is not None
        self.take_late()
        if self.table.on_gpu:
            sent.counts.note_stream(self.window.current_stream())
        if not (state.is_sending or state.is_open):
            self.ledger.require_no_average(slot)
            self.comparison.loop.note_gradient(slot)
        if not state.is_sending or state.reductions == 0:  # the first pass only counts: its gradients wait, too
            state.late = slot
            if slot.hook is None or slot.hook.is_last(slot.param):
                self.take_late()
        elif slot.expected and self.window.sends_early(self.table.shards):
            self._launch_ready()

    def take_late(self) -> None:
        """Move the last gradient into its bucket, as all its hooks have run by now."""
        state = self.step_state
        late, state.late = state.late, None
        if late is not None and not state.is_sending:
            late.accumulate()
        elif late is not None:
            late.adopt() if late.sent is not None and late.sent.work is None else late.show_bucket()

    def may_count(self) -> bool:
        """Return whether hooks may count gradients without calling :meth:`take` until the next bucket is complete."""
        state = self.step_state
        counts_alone = state.is_sending and state.late is None and state.role is not Role.NEW
        return counts_alone and state.reductions > 0 and not self._next_is_ready()

    def drop_launched(self) -> None:
        """Discard a pass that ended with an exception. Only for a single rank, as others would wait for the rest."""
        for sent in self.table.buckets:
            sent.abandon()
        self.table.drop_gradients()
        self.step_state.pass_fails()

    # Launching.

    def _launch_ready(self) -> None:
        firing = self.step_state.firing
        if firing is not None and firing.hook is not None and not firing.hook.is_last(firing.param):
            return  # a later hook may still change this gradient; launched with the next one, or at the end
        while self._next_is_ready():
            self.launch(self.table.buckets[self.step_state.launched])

    def _next_is_ready(self) -> bool:
        buckets, launched = self.table.buckets, self.step_state.launched
        return launched < len(buckets) and buckets[launched].ready()

    def launch_rest(self) -> None:
        """Launch the remaining buckets, in order, and what follows them."""
        state = self.step_state
        if state.launched == 0:
            round_gradients(self.table.slots())
            self.window.fix_clipping(self.table.slots(), self.table.shards)
        while state.launched < len(self.table.buckets):
            sent = self.table.buckets[state.launched]
            if sent.work is None:
                self.launch(sent)
            else:
                state.launched += 1  # it was launched ahead
        if self.buffers is not None and self._buffer_work is None:
            self._buffer_work = self.submit(self.communicator, self.buffers.run)
        self.members.launched(self)

    def restart(self, lanes: Sequence[Communicator]) -> None:
        """Prepare to launch all buckets of this step again, over ``lanes``."""
        self.lanes, self._buffer_work = lanes, None
        self.step_state.launched = 0
        self.comparison.replicas.question = None
        self.window.rescale()
        self.hash_state()

    def launch_ahead(self, number: int) -> Work | GpuWork:
        """Launch the bucket of this ``number`` before others of its reduction."""
        self.step_state.launched, sent = number, self.table.buckets[number]
        self.launch(sent)
        self.step_state.launched = 0
        assert sent.work is not None
        return sent.work

    def launch(self, sent: SentBucket, grads: Grads | None = None) -> None:
        """Launch the bucket ``sent`` with ``grads``, or with its parameters' present gradients."""
        self.members.launching(sent)
        state, weights = self.step_state, self.window.weights
        state.launched += 1
        if state.launched == len(self.table.buckets):  # before the launch, as the others may have all at once
            self.statistics.waits.arrive(state.reductions)
        if grads is None:
            if self.settings.accumulates:
                round_gradients(sent.slots)
            if not state.is_open and state.launched == 1:
                self.comparison.loop.note_gradient(sent.slots[0])
            grads = self.ledger.sendable(sent)
            if weights.is_zero or self.window.skips:
                grads = [None] * len(grads)
            elif self.table.on_gpu and self.comparison.requests.veto is not None:  # the host waits for no other veto
                grads[0] = torch.full_like(sent.bucket.views[0], math.nan)
        state.contributed |= any(grad is not None for grad in grads)
        sent.work = self.submit(sent.communicator, self._exchange_of(sent, grads, state.launched))
        firing = state.firing if state.firing is not None and state.firing.sent is sent else None
        if firing is not None:
            state.late = firing  # later hooks (DistributedDataParallel's) still need its gradient
        # This frees autograd's own allocations as soon as they have been packed.
        sent.bucket.show(-1 if firing is None else firing.index)

    def _exchange_of(self, sent: SentBucket, grads: Grads, number: int) -> Callable[[], None]:
        """Return the job that exchanges ``grads`` of the ``number``-th launched bucket; its inputs are fixed now.

        On a GPU they are packed here, on the stream that made them, which then reuses their memory.
        """
        fingerprint, phases = self.comparison.bits_of(number), self.statistics.phases
        reduction, channel, exchange = self.reduction, sent.communicator.channel, sent.exchange
        if self.table.on_gpu:
            with channel.reading(self.table.device, self.window.streams.union(sent.counts.take_streams())):
                self._take_second(sent, grads)
                phases.exchange(number, None, functools.partial(reduction.pack, exchange, grads, fingerprint))
            return functools.partial(phases.exchange, number, None, exchange.send)
        self._take_second(sent, grads)
        # attach has compared all buckets: ranks that agree on the first lane's first exchange agree on all later ones,
        # as the other lanes carry nothing else.
        is_first = sent is next(each for each in self.table.buckets if each.communicator is self.communicator)
        waiting, packed = [grads], self.step_state.packed

        def pack(*, frees: bool = False) -> None:
            if waiting:
                reduction.pack(exchange, waiting.pop(), fingerprint, frees=frees)
                packed.append(number)

        def run() -> None:
            if waiting:  # first, as the rest may fail when a rank is lost
                waiting.append(self.members.contributed(sent, waiting.pop()))
            reduction.run(exchange, pack, channel, is_compared=is_first)

        if self._is_behind():
            phases.exchange(number, None, functools.partial(pack, frees=True))
        return functools.partial(phases.exchange, number, channel.recorder, run)

    def _take_second(self, sent: SentBucket, grads: Grads) -> None:
        if self._second is not None:
            self._second.take(sent, grads)

    def _is_behind(self) -> bool:
        """Return whether more launched buckets than one wait to be packed, so that backward should pack the next.

        Gradients are freed when they have been packed. Packing may be collective if ranks have weights, if the method
        measures, and where ranks may be lost.
        """
        is_alone = not (self.window.weights.in_use or self.members.survives or self.settings.compression.measures)
        return is_alone and len(self.step_state.packed) < self.step_state.launched - _MOST_WAITING

    def submit(self, communicator: Communicator, job: Callable[[], None]) -> Work | GpuWork:
        """Run ``job`` on the communication thread of ``communicator``, or its stream."""
        return self.members.submit(job, lambda each: self.reduction.submit(each, communicator.channel))

    # Receiving.

    def reduce(self, find_new: Callable[[], None] | None, admit_new: Callable[[], None]) -> None:
        """Launch the remaining buckets, wait for all, and hand out the averages.

        Args:
            find_new: called first where ranks do not announce new parameters; creates buckets for them.
            admit_new: the same where they do, when all ranks have announced some.
        """
        self.step_state.late, succeeded = None, False
        try:
            if find_new is not None:
                find_new()
            self.launch_rest()
            self.statistics.phases.trace.end_backward()
            self.statistics.waits.begin()
            arrivals = self.members.receive(self, admit_new)
            self.statistics.waits.count(arrivals, warn=self.communicator.rank == 0)
            self.table.stepper.forget()  # drops a clipping factor that no step has used
            succeeded = True
        except BaseException as error:
            self.table.drop_gradients(error)  # they are not averages, and must not be mistaken for them
            raise
        finally:
            for sent in self.table.buckets:
                sent.work = None
            self._buffer_work = None
            self.comparison.restart()
            self.statistics.waits.end()
            self.members.ended(self)
            self.step_state.reduced(succeeded=succeeded)
        self.statistics.phases.trace.end_reduction()
        self.hash_state()
        self._report_world()
        if self._second is not None:
            scaling, factor = self.reduction.scaling, self.outcome.skipping_factor()
            self._second.compare(scaling, factor, self.statistics, has_averages=not self.outcome.is_left_out())

    def _report_world(self) -> None:
        old, self.reported_world = self.reported_world, self.world
        if old != self.reported_world:
            for callback in list(self.callbacks):
                callback(old, self.reported_world)

    def look_again(self) -> None:
        """Compare the replicas again before a step, if the reduction has found a difference. Collective in that case.

        Ranks that may go on without a damaged one leave out the step, as its gradients are in the averages.
        """
        try:
            self.comparison.replicas.look_again()
        except RuntimeError as error:  # a CommError is one
            self.table.drop_gradients(error)
            self.table.stepper.forget()
            self.step_state.leaves_out_step()
            if not isinstance(error, DamageError):
                raise
            self.members.recover(self, error)
            self._report_world()

    def await_all(self, then: Callable[[], None], admit_new: Callable[[], None]) -> None:
        """Wait for all results, also for new parameters, and compare the ranks' records.

        Args:
            then: called after each wait for buckets.
            admit_new: called when all ranks have announced new parameters; creates buckets for them.
        """
        self._await_results(then)
        self.comparison.receive()
        if self.comparison.fingerprint.verdict.has_new:
            admit_new()
            self.launch_rest()
            self._await_results(then)

    def works(self) -> list[Work | GpuWork]:
        """Return the launched works of this step: buckets, then the module's buffers."""
        works = [*(sent.work for sent in self.table.buckets), self._buffer_work]
        return [work for work in works if work is not None]

    def hash_state(self) -> None:
        """Hash compression's new state if the next reduction checks that nothing else has changed it."""
        taken = self.comparison.replicas.taking(self.step_state.reductions)
        if taken is None:
            return
        if self.table.on_gpu:
            taken.take()
        else:
            self.submit(self.communicator, taken.take)  # before the packing that compares them

    def _await_results(self, then: Callable[[], None]) -> None:
        with self.statistics.phases.timed("wait"):
            # Buckets that ranks compare come first: after a disagreement, waiting for the others would be in vain.
            for sent in sorted(self.table.buckets, key=lambda sent: sent.communicator is not self.communicator):
                assert sent.work is not None
                sent.work.wait()
            if self._buffer_work is not None:
                self._buffer_work.wait()
            then()

    def share_source(self) -> None:
        """Share which rank has a non-finite gradient. Collective, if any has one."""
        self.reduction.share_source(self.table.buckets)

    def hand_out(self) -> None:
        with self.statistics.phases.timed("unpack"):
            self.outcome.hand_out()

    def release(self) -> None:
        """Release what refers to parameters, buffers and other ranks, as the training has ended."""
        self.buffers = None
        self.comparison.replicas.release()
        self.statistics.waits.close()

    # State that is carried from step to step.

    def state(self) -> State:
        """Return this rank's state of compression, by parameter (not copied)."""
        return state_of(self.table.buckets)

    def load_state(self, state: State, num_steps: int) -> None:
        """Load a result of :meth:`state`, taken after ``num_steps`` committed steps."""
        for sent in self.table.buckets:
            sent.exchange.load_state(state)
        self.statistics.figures.forget()
        self.reduction.committed.fill_(num_steps)
        self.hash_state()  # replaces hashes of the old state

    def stats(self) -> dict[str, Any]:
        transport = "nccl" if self.table.on_gpu else self.communicator.transport
        counters = self.statistics.report(self.table, self.step_state.reductions, self.world)
        return {**counters, "transport": transport, **self.outcome.stats(), **self.members.stats()}
