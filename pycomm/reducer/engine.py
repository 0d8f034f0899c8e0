"""Engine of a Reducer: launches buckets while backward runs, waits for them, and hands them out as ``.grad``."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Scaling
from pycomm.reducer.answers import Answers
from pycomm.reducer.arrivals import Waits
from pycomm.reducer.buckets import BucketInFlight, Slot, round_gradients
from pycomm.reducer.figures import CompressionFigures
from pycomm.reducer.gradient_checks import gradients_of, require_no_average, require_sendable
from pycomm.reducer.module_buffers import BufferSync
from pycomm.reducer.occasions import Occasions
from pycomm.reducer.outcome import Outcome
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.phases import Phases
from pycomm.reducer.progress import Progress
from pycomm.reducer.rank_comparison import RankComparison
from pycomm.reducer.sample_weights import SampleWeights
from pycomm.reducer.settings import Settings
from pycomm.reducer.survival import Survival
from pycomm.reducer.window import AccumulationWindow
from pycomm.transport.gpu import GpuWork
from pycomm.worker import Work


class Engine(Answers, Occasions):
    """Engine that sends the gradients of a window, bucket by bucket, in the same order on all ranks.

    A bucket is launched, handed to the communication thread, which packs and exchanges it, when all its
    gradients have arrived and all buckets before it have been launched; at the end of backward if it has
    parameters that this step did not use. The very first pass only learns how often each gradient is
    accumulated (several times, for a parameter shared between checkpointed pieces), and launches at its end.

    On a GPU the communication thread is a stream, and that of ``backward()`` waits for it. The host waits only where
    this rank lacks a gradient, to learn whether another one has it.

    Attributes:
        table: parameters and their buckets.
        communicator: the ranks to average over.
        lanes: communicators that buckets travel by, in turns; ``communicator`` first.
        settings: arguments of ``attach``.
        window: accumulation window, the passes that make up a step.
        progress: counts of reductions and steps.
        firing: slot of the parameter whose hooks are running, if any.
        buffers: synchronisation of the module's buffers, if they are kept equal.
        outcome: of the last reduction.
        waits, phases: accounts of who was waited for, and of where the time goes.
        figures: what compression leaves out.
        comparison, flags: what this rank tells the others with each reduction, and hears of them.
        admit_new: called when all ranks have told of new parameters; makes buckets for them.
        survival: what goes on without ranks that are lost; ``None`` here.
    """

    survival: Survival | None = None

    def __init__(self, table: ParameterTable, lanes: Sequence[Communicator], settings: Settings) -> None:
        self.lanes, self.settings, self.communicator = lanes, settings, lanes[0]
        self.table = table
        self.window = AccumulationWindow(self.communicator, settings, table.device, table.on_gpu)
        self.progress = Progress(table.device if table.on_gpu else None)
        self.comparison = RankComparison(
            self.communicator, table, settings, self.progress, self._named_buffers, lambda: self.world
        )
        self.flags = self.comparison.flags
        self.admit_new: Callable[[], None] = lambda: None
        self.buffers: BufferSync | None = None
        self.outcome = Outcome(table, settings, self.flags, self.progress, lambda: self.communicator.size)
        self.waits, self.phases, self.figures = Waits(), Phases(), CompressionFigures()
        self._buffer_work: Work | GpuWork | None = None
        self._num_launched, self._has_sent = 0, False  # in this reduction: of buckets; whether with any gradient
        self.firing: Slot | None = None
        self._late: Slot | None = None  # its .grad becomes its view once all its hooks have run

    # A pass.

    def begin_pass(self, *, with_next: bool | None = True) -> None:
        """Prepare the buckets for this pass's gradients; fix the scales if it is the last pass of its window.

        Args:
            with_next: whether another pass, with its samples, is part of it; ``None`` if the scales have been fixed.
        """
        self.phases.begin()
        self.table.await_parameters()
        self.expect_gradients()
        if self.window.sending:
            self.flags.require_suitable()
            self._compare_previous()
            if with_next is not None:
                self.window.fix_scales(with_next=with_next, step=self.outcome.committed_steps)

    def expect_gradients(self) -> None:
        """Prepare the buckets for another pass's gradients."""
        self._num_launched, self._late, self._has_sent = 0, None, False
        for flight in self.table.flights:
            flight.begin_pass()

    def take(self, slot: Slot) -> None:
        """Note that the gradient of ``slot`` has been accumulated; launch the buckets that are ready."""
        slot.fire()
        require_sendable(slot)
        flight = slot.flight
        assert flight is not None
        self.settle_late()
        if self.table.on_gpu:
            flight.producers.add(self.communicator.channel.current_stream(self.table.device))
        if not self.window.sending:
            if not self.window.is_open:
                require_no_average(slot, self.settings)
                self.flags.loop.note_gradient(slot)
            if slot.hook is None or slot.hook.is_last(slot.param):
                slot.accumulate()
            else:
                self._late = slot
        elif slot.expected and self.window.sends_early(self.table.shards):
            self._launch_ready()

    def settle_late(self) -> None:
        """Take the last gradient out of the user's sight, whose hooks have all run by now."""
        late, self._late = self._late, None
        if late is not None:
            late.show_bucket() if self.window.sending else late.accumulate()

    def may_count(self) -> bool:
        """Return whether hooks may count further gradients of this pass without :meth:`take`, until one is missing."""
        if self.table.on_gpu or not self.window.sending or self._late is not None:
            return False
        return not self._next_is_ready()

    def drop_launched(self) -> None:
        """Forget a pass that ended with an exception; only if no other rank waits for the rest of it."""
        for flight in self.table.flights:
            flight.abandon()
        self.table.drop_gradients()
        self._num_launched = 0

    # Launching.

    def _launch_ready(self) -> None:
        firing = self.firing
        if firing is not None and firing.hook is not None and not firing.hook.is_last(firing.param):
            return  # a later hook may still change this gradient; launched with the next one, or at the end
        while self._next_is_ready():
            self._launch(self.table.flights[self._num_launched])

    def _next_is_ready(self) -> bool:
        flights = self.table.flights
        return self._num_launched < len(flights) and flights[self._num_launched].ready()

    def launch_rest(self) -> None:
        """Launch the remaining buckets, in order."""
        if self._num_launched == 0:
            round_gradients(self.table.slots())
            self.window.fix_clipping(self.table.slots(), self.table.shards)
        while self._num_launched < len(self.table.flights):
            self._launch(self.table.flights[self._num_launched])
        if self.buffers is not None and self._buffer_work is None:
            self._buffer_work = self._submit(self.communicator, self.buffers.run, [], set())

    def _launch(self, flight: BucketInFlight, grads: list[torch.Tensor | None] | None = None) -> None:
        """Launch ``flight``, with the gradients that its parameters have if none are given."""
        self._num_launched += 1
        if self._num_launched == len(self.table.flights):  # before it is launched: others may have it at once
            self.waits.arrive(self.progress.num_reductions)
        weights = self.window.weights
        if grads is None:
            if self.settings.accumulates:
                round_gradients(flight.slots)
            if not self.window.is_open and self._num_launched == 1:
                self.flags.loop.note_gradient(flight.slots[0])
            grads = gradients_of(flight, self.settings, is_first_pass=not self.window.is_open)
            if weights.is_zero or self.flags.skips:
                grads = [None] * len(grads)
            elif self.flags.veto is not None and self.table.on_gpu:  # where the host does not wait to hear of it
                grads[0] = torch.full_like(flight.bucket.views[0], math.nan)
        self._has_sent |= any(grad is not None for grad in grads)
        if weights.in_use and self.table.on_gpu:
            weights.relative()  # waits on the host here, so that the job does not have to
        job = self._exchange_of(flight, grads, self._num_launched)
        flight.work = self._submit(flight.communicator, job, grads, flight.producers | self.window.streams)
        flight.producers = set()
        for slot in flight.slots:
            if slot is self.firing:
                self._late = slot  # hooks called after ours (DistributedDataParallel's) still need its gradient
            else:
                slot.show_bucket()  # autograd's own allocation is freed as soon as it has been packed

    def _exchange_of(self, flight: BucketInFlight, grads: list[torch.Tensor | None], number: int) -> Callable[[], None]:
        """Return the job that exchanges ``grads`` of the bucket launched as ``number``; its inputs are fixed now."""
        weights = self.window.weights if self.window.weights.in_use else None
        fingerprint = self.comparison.fingerprint_of(number)
        is_first = number <= len(self.lanes)  # on its lane
        # attach has compared all buckets: ranks that agree on a lane's first exchange agree on all after it.
        run = functools.partial(_exchange, flight, grads, self.window.scaling, weights, fingerprint, is_first)
        recorder = None if self.table.on_gpu else flight.communicator.channel.recorder
        return functools.partial(self.phases.exchange, number, recorder, run)

    def _submit(
        self,
        communicator: Communicator,
        job: Callable[[], None],
        reads: list[torch.Tensor | None],
        producers: set[int],
    ) -> Work | GpuWork:
        if self.table.on_gpu:
            return communicator.channel.submit_on_gpu(self.table.device, job, reads, producers)
        return communicator.channel.submit(job)

    # Receiving.

    def reduce(self) -> None:
        """Launch the remaining buckets, wait for all, and hand out the averages."""
        self.launch_rest()
        self.phases.end_backward()
        self.waits.begin()
        self._late = None
        try:
            self._receive()
            self.waits.count(self._arrivals(), warn=self.communicator.rank == 0)
            self.table.stepper.forget()  # a factor left for a step that never came belonged to other gradients
        except BaseException:
            self.table.drop_gradients()  # they are no averages, and must not be mistaken for them
            raise
        finally:
            for flight in self.table.flights:
                flight.work = None
            self._buffer_work = None
            self.flags.reduced()
            self.window.close()
            self.waits.end()
        self.phases.end_reduction()
        self.hash_state()

    def _receive(self) -> None:
        """Wait for all results, and hand them out."""
        self._await_all()
        with self.phases.unpacking():
            self._hand_out()

    def _await_all(self) -> None:
        """Wait for all results, those of parameters that are new among them; compare what the ranks have told."""
        with self.phases.waiting():
            self._await_results()
            self._share_sources()
        self.comparison.compare()
        if self.flags.heard.new:
            self.admit_new()
            self.launch_rest()
            with self.phases.waiting():
                self._await_results()
                self._share_sources()

    def _share_sources(self) -> None:
        self.outcome.source.share(self.table.flights, self.communicator)

    def _arrivals(self) -> Mapping[int, float]:
        return self.waits.on_board()

    def _compare_previous(self) -> None:
        self.comparison.compare_previous()

    def hash_state(self) -> None:
        """Have the state of compression hashed, which has just changed, if it is to be looked at before it changes."""
        taken = self.comparison.taking()
        if taken is not None:
            self._submit(self.communicator, taken.take, [], set())

    def _await_results(self) -> None:
        for flight in self.table.flights:
            assert flight.work is not None
            flight.work.wait()
        if self._buffer_work is not None:
            self._buffer_work.wait()

    def _hand_out(self) -> None:
        self.outcome.hand_out(has_sent=self._has_sent)


def _exchange(
    flight: BucketInFlight,
    grads: list[torch.Tensor | None],
    scaling: Scaling,
    weights: SampleWeights | None,
    fingerprint: Callable[[], torch.Tensor] | None,
    is_compared: bool,
) -> None:
    """Exchange ``grads``: a job on the communication thread or stream."""
    if weights is not None:
        scaling = replace(scaling, relative=weights.relative())
    if fingerprint is not None:
        scaling = replace(scaling, fingerprint=fingerprint())
    channel = flight.communicator.channel
    with contextlib.nullcontext() if flight.bucket.on_gpu else channel.skip_checks(but_first=is_compared):
        flight.exchange.exchange(grads, scaling)
