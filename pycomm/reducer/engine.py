"""Engine of a Reducer: launches buckets while backward runs, waits for them, and hands them out as ``.grad``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Flag, Scaling
from pycomm.reducer.answers import Answers
from pycomm.reducer.arrivals import Waits
from pycomm.reducer.buckets import BucketInFlight, Slot
from pycomm.reducer.figures import CompressionFigures
from pycomm.reducer.gradient_checks import gradients_of, require_no_average, require_sendable
from pycomm.reducer.module_buffers import BufferSync
from pycomm.reducer.nonfinite import NonfiniteSource
from pycomm.reducer.occasions import Occasions
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.phases import Phases
from pycomm.reducer.progress import Progress
from pycomm.reducer.replicas import ReplicaCheck
from pycomm.reducer.sample_weights import SampleWeights
from pycomm.reducer.settings import Settings
from pycomm.reducer.survival import Survival
from pycomm.reducer.verdicts import all_finite, needs_verdict, spread_failure, spread_failure_of_parts
from pycomm.reducer.window import AccumulationWindow
from pycomm.transport.gpu import GpuWork
from pycomm.worker import Work


class Engine(Answers, Occasions):
    """Engine that sends the gradients of one window, bucket by bucket, in the same order on all ranks.

    A bucket is launched, handed to the communication thread, which packs and exchanges it, when all its
    gradients have arrived and all buckets before it have been launched; at the end of backward if it has
    parameters that this step did not use. The very first pass only learns how often each gradient is
    accumulated (several times, for a parameter shared between checkpointed pieces), and launches at its end.

    On a GPU the communication thread is a stream, and the stream of ``backward()`` waits for it. The host
    waits only in steps in which this rank lacks a gradient, to learn whether another rank has it.

    Attributes:
        table: parameters and their buckets.
        communicator: the ranks to average over.
        lanes: communicators that buckets travel by, in turns; ``communicator`` first.
        settings: arguments of ``attach``.
        window: accumulation window, the passes that make up a step.
        progress: counts of reductions and steps.
        firing: slot of the parameter whose hooks are running, if any.
        buffers: synchronisation of the module's buffers, if they are kept equal.
        finite: whether the last step was finite; ``None`` if nothing needed to know.
        not_finite: name of the first gradient that is not finite on some rank, if each rank has only its own part.
        nonfinite_steps, committed_steps: counts, 0-d int64 tensors on the gradients' device.
        waits: account of who was waited for.
        phases: account of where the time goes.
        figures, source: what compression leaves out, and who had the last gradient that was not finite.
        survival: what goes on without ranks that are lost; ``None`` here.
    """

    survival: Survival | None = None

    def __init__(self, table: ParameterTable, lanes: Sequence[Communicator], settings: Settings) -> None:
        self.lanes, self.settings, self.communicator = lanes, settings, lanes[0]
        self.table = table
        self.window = AccumulationWindow(self.communicator, settings, table.device, table.on_gpu)
        self.progress = Progress(table.device if table.on_gpu else None)
        self._replica_check = ReplicaCheck(
            *(self.communicator, table.device, settings.check_replicas, not table.on_gpu, table.locals),
            *(self._named_buffers, lambda: self.world),
        )
        self.buffers: BufferSync | None = None
        self.finite: Flag | None = None
        self.not_finite: str | None = None
        self.nonfinite_steps = torch.zeros((), dtype=torch.int64, device=table.device)
        self.committed_steps = torch.zeros((), dtype=torch.int64, device=table.device)
        self.waits, self.phases = Waits(), Phases()
        self.figures, self.source = CompressionFigures(), NonfiniteSource()
        self._buffer_work: Work | GpuWork | None = None
        self._num_launched = 0
        self.firing: Slot | None = None
        self._late: Slot | None = None  # its .grad becomes its view once all its hooks have run

    # A pass.

    def begin_pass(self) -> None:
        """Prepare the buckets for this pass's gradients; fix the scales if it is the last pass of its window."""
        self.phases.begin()
        self.table.await_parameters()
        self.expect_gradients()
        if self.window.sending:
            self._check_previous()
            self.window.fix_scales(with_next=True, step=self.committed_steps)

    def expect_gradients(self) -> None:
        """Prepare the buckets for another pass's gradients."""
        self._num_launched, self._late = 0, None
        for flight in self.table.flights:
            flight.begin_pass()

    def take(self, slot: Slot) -> None:
        """Note that the gradient of ``slot`` has been accumulated; launch the buckets that are ready."""
        slot.fire()
        require_sendable(slot)
        flight = slot.flight
        assert flight is not None
        late, self._late = self._late, None
        if late is not None:
            late.show_bucket()
        if self.table.on_gpu:
            flight.producers.add(self.communicator.channel.current_stream(self.table.device))
        if not self.window.sending:
            if not self.window.is_open:
                require_no_average(slot, self.settings)
            slot.adopt()
        elif slot.expected and self.window.sends_early(self.table.shards):
            self._launch_ready()

    def may_count(self) -> bool:
        """Return whether hooks may count further gradients of this pass without :meth:`take`, until one is missing."""
        if self.table.on_gpu or not self.window.sending or self._late is not None:
            return False
        return not self._next_is_ready()

    def drop_launched(self) -> None:
        """Forget a pass that ended with an exception; only if no other rank waits for the rest of it."""
        for flight in self.table.flights:
            if flight.work is not None:
                flight.work.wait()
                flight.work = None
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
            grads = gradients_of(flight, self.settings, is_first_pass=not self.window.is_open)
            if weights.is_zero:
                grads = [None] * len(grads)
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
        steps, reductions = self.progress.num_steps, self.progress.num_reductions
        fingerprint = self._replica_check.fingerprint(steps, reductions) if number == 1 else None
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
            self.window.close()
            self.waits.end()
        self.phases.end_reduction()
        self.hash_state()

    def _receive(self) -> None:
        """Wait for all results, and hand them out."""
        with self.phases.waiting():
            self._await_results()
            self.source.share(self.table.flights, self.communicator)
        self._check_replicas()
        with self.phases.unpacking():
            self._hand_out()

    def _arrivals(self) -> Mapping[int, float]:
        """Return when the ranks had all their gradients of this reduction, in seconds; as far as it is known."""
        return self.waits.on_board()

    def _check_replicas(self) -> None:
        if self.table.flights:
            differing = self.table.flights[0].exchange.differing()
            progress = self.progress
            progress.num_steps = self._replica_check.check(differing, progress.num_steps, progress.num_reductions)

    def _check_previous(self) -> None:
        progress = self.progress
        progress.num_steps = self._replica_check.check_previous(progress.num_steps, progress.num_reductions)

    def hash_state(self) -> None:
        """Have the state of compression hashed, which has just changed, if it is to be looked at before it changes."""
        taken = self._replica_check.taking(self.table.flights, self.progress.num_reductions)
        if taken is not None:
            self._submit(self.communicator, taken.take, [], set())

    def _await_results(self) -> None:
        for flight in self.table.flights:
            assert flight.work is not None
            flight.work.wait()
        if self._buffer_work is not None:
            self._buffer_work.wait()

    def _hand_out(self) -> None:
        flights, progress = self.table.flights, self.progress
        self.finite = self._count_step() if needs_verdict(flights, self.table.shards, self.settings) else None
        self.source.count(self.finite)
        finite: Flag = True if self.finite is None else self.finite
        for flight in flights:
            flight.hand_out(finite)
        spread_failure(flights, self.table.shards, self.settings.loss_scaler)
        if self.table.partial is not None:
            self.not_finite = spread_failure_of_parts(flights, self.table.partial)
        progress.reduced(False if self.finite is None else self.finite)

    def _count_step(self) -> Flag:
        """Return whether the step is finite; all ranks agree."""
        finite = all_finite(self.table.flights, self.table.shards)
        self.nonfinite_steps += ~finite
        self.committed_steps += finite
        return finite if self.table.on_gpu else bool(finite)


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
