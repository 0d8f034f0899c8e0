"""Engine of a Reducer: buckets launched while backward runs, waited for, and handed out as ``.grad``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Flag
from pycomm.reducer import norms
from pycomm.reducer.buckets import BucketInFlight, Slot, method_stats, nonfinite_source
from pycomm.reducer.gradient_checks import require_no_average, require_sendable
from pycomm.reducer.module_buffers import BufferSync
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.progress import Progress
from pycomm.reducer.replicas import Agreement
from pycomm.reducer.settings import Settings
from pycomm.reducer.window import AccumulationWindow
from pycomm.transport.gpu import GpuWork
from pycomm.worker import Work


class Engine:
    """Sends the gradients of one window, bucket by bucket, in an order that is the same on all ranks.

    A bucket is launched when all its gradients are there and all buckets before it have been launched:
    it is handed to the communication thread, which packs and exchanges it while backward goes on. What
    has not been launched when backward has computed everything (parameters that this step did not use)
    goes then. The very first pass only learns how often each gradient is accumulated (parameters shared
    between checkpointed pieces: several times) and launches everything at its end.

    On a GPU the communication thread is a stream, and waiting means that the stream on which
    ``backward()`` was called waits: the host goes on. It waits only in steps in which this rank has no
    gradient for some parameter, to learn whether another has.

    Attributes:
        table: of parameters and their buckets. window: of the passes that make a step.
        progress: reductions and steps.
        firing: whose hooks are being called.
        measures: whether norms are taken as gradients are received.
        buffers: what keeps the module's buffers equal, if anything does.
        finite: whether the last step was finite; ``None`` where nothing had to know.
        nonfinite_steps, committed_steps: counts, 0-d int64 where the gradients are.
        wait_seconds: how long the host has waited for communication.
    """

    def __init__(
        self,
        table: ParameterTable,
        communicator: Communicator,
        settings: Settings,
    ) -> None:
        self._communicator, self._settings = communicator, settings
        self.table = table
        self.window = AccumulationWindow(communicator, settings, table.device, table.on_gpu)
        self.progress = Progress(table.device if table.on_gpu else None)
        self._agreement = Agreement(
            communicator, table.device, settings.check_replicas, not table.on_gpu, table.named, self._named_buffers
        )
        self.measures = False
        self.buffers: BufferSync | None = None
        self.finite: Flag | None = None
        self.nonfinite_steps = torch.zeros((), dtype=torch.int64, device=table.device)
        self.committed_steps = torch.zeros((), dtype=torch.int64, device=table.device)
        self.wait_seconds = 0.0
        self._buffer_work: Work | GpuWork | None = None
        self._num_launched = 0
        self.firing: Slot | None = None
        self._late: Slot | None = None  # whose .grad is to be its view, once its hooks have been called

    def _named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers that nothing makes equal; the others differ until the reduction ends."""
        module = self.table.module
        return [] if module is None or self.buffers is not None else list(module.named_buffers())

    # A pass.

    def begin_pass(self) -> None:
        """Let the buckets expect this pass's gradients; fix the scales, if it is the last of its window."""
        self.expect_gradients()
        if self.window.sending:
            self._agreement.look_back(self.progress.num_steps, self.progress.num_reductions)
            self.window.fix_scales(with_next=True, step=self.committed_steps)

    def expect_gradients(self) -> None:
        """Let the buckets expect gradients."""
        self._num_launched, self._late = 0, None
        for flight in self.table.flights:
            flight.begin_pass()

    def take(self, slot: Slot) -> None:
        """Note that the gradient of ``slot`` has been accumulated; launch what is ready."""
        slot.fire()
        require_sendable(slot)
        flight = slot.flight
        assert flight is not None
        late, self._late = self._late, None
        if late is not None:
            late.show_bucket()
        if self.table.on_gpu:
            flight.producers.add(self._communicator.channel.current_stream(self.table.device))
        if not self.window.is_open:
            require_no_average(slot, self._settings)
        if not self.window.sending:
            slot.adopt()
        elif slot.expected and self._settings.clip_local_norm is None:
            self._launch_ready()

    def has_launched(self) -> bool:
        """Return whether part of this pass's gradients has been sent."""
        return self._num_launched > 0

    def is_waited_for(self) -> bool:
        """Return whether some bucket is under way."""
        return any(flight.work is not None for flight in self.table.flights)

    def drop_launched(self) -> None:
        """Forget a pass that ended with an exception, where nobody else waits for the rest of it."""
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
            return  # the gradient may not be what it will be: with the next one, or when all are there
        flights = self.table.flights
        while self._num_launched < len(flights) and flights[self._num_launched].ready():
            self._launch(flights[self._num_launched])

    def launch_rest(self) -> None:
        """Launch what is left, in order."""
        if self._num_launched == 0:
            self.window.fix_clipping(self.table.slots())
        while self._num_launched < len(self.table.flights):
            self._launch(self.table.flights[self._num_launched])
        if self.buffers is not None and self._buffer_work is None:
            self._buffer_work = self._submit(self.buffers.run, [], set())

    def _launch(self, flight: BucketInFlight) -> None:
        self._num_launched += 1
        weights = self.window.weights
        grads = [None if weights.nothing_here else slot.param.grad for slot in flight.slots]
        if weights.in_use and self.table.on_gpu:
            weights.relative()  # the host waits here; on the communication thread nobody needs to
        job = self._exchange_of(flight, grads, is_first=self._num_launched == 1)
        flight.work = self._submit(job, grads, flight.producers | self.window.streams)
        flight.producers = set()
        for slot in flight.slots:
            if slot is self.firing:
                self._late = slot  # hooks that are called after ours, DistributedDataParallel's say, want its gradient
            else:
                slot.show_bucket()  # frees what autograd allocated as soon as it is packed

    def _exchange_of(
        self, flight: BucketInFlight, grads: list[torch.Tensor | None], is_first: bool
    ) -> Callable[[], None]:
        """Return the job that exchanges ``grads``; what it is given is fixed now."""
        weights, scaling = self.window.weights, self.window.scaling
        weighted, on_gpu = weights.in_use, self.table.on_gpu
        measures = self.measures and not flight.exchange.transactional
        steps, reductions = self.progress.num_steps, self.progress.num_reductions
        fingerprint = self._agreement.fingerprint(steps, reductions) if is_first else None

        def job() -> None:
            scales = replace(scaling, relative=weights.relative()) if weighted else scaling
            if fingerprint is not None:
                scales = replace(scales, fingerprint=fingerprint())
            # attach compared all buckets: once the ranks are in the same reduction, they agree on the rest of it.
            compared = contextlib.nullcontext() if is_first or on_gpu else self._communicator.channel.skip_checks()
            with compared:
                flight.exchange.exchange(grads, scales)
            if measures:
                norms.measure(flight)

        return job

    def _submit(self, job: Callable[[], None], reads: list[torch.Tensor | None], producers: set[int]) -> Work | GpuWork:
        if self.table.on_gpu:
            return self._communicator.channel.submit_on_gpu(self.table.device, job, reads, producers)
        return self._communicator.channel.submit(job)

    # Receiving.

    def reduce(self) -> None:
        """Launch what is left, wait for all, hand out."""
        self.launch_rest()
        start = time.perf_counter()
        self._late = None
        try:
            for flight in self.table.flights:
                assert flight.work is not None
                flight.work.wait()
            if self._buffer_work is not None:
                self._buffer_work.wait()
            self._hand_out()
            self.table.stepper.forget()  # whatever was left for a step that did not come was of other gradients
        except BaseException:
            self.table.drop_gradients()  # no average, and nobody is to take it for one
            raise
        finally:
            for flight in self.table.flights:
                flight.work = None
            self._buffer_work = None
            self.window.close()
        self.wait_seconds += time.perf_counter() - start

    def _hand_out(self) -> None:
        flights, progress = self.table.flights, self.progress
        if flights:
            self._agreement.look(flights[0].exchange.differing(), progress.num_steps, progress.num_reductions)
        stateful = any(flight.exchange.transactional for flight in flights)
        self.finite = self._count_step() if stateful else None
        finite: Flag = True if self.finite is None else self.finite
        for flight in flights:
            flight.hand_out(finite)
        progress.reduced(False if self.finite is None else self.finite)

    def _count_step(self) -> Flag:
        """Return whether the step is finite, decided by what all ranks received alike: they agree without a message."""
        flags = [flight.exchange.finite() for flight in self.table.flights]
        finite = torch.stack([torch.as_tensor(flag) for flag in flags]).all()
        self.nonfinite_steps += ~finite
        self.committed_steps += finite
        return finite if self.table.on_gpu else bool(finite)

    # What users ask.

    def stats(self) -> dict[str, Any]:
        """Return the counters of ``Reducer.stats``."""
        nonfinite_steps = int(self.nonfinite_steps.item())
        last_nonfinite = nonfinite_source(self.table.flights) or "a sum over the ranks" if nonfinite_steps else None
        return {
            "bytes_sent": sum(flight.exchange.bytes_sent for flight in self.table.flights),
            "steps": self.progress.num_reductions,
            "wait_seconds": self.wait_seconds,
            "nonfinite_steps": nonfinite_steps,
            "last_nonfinite": last_nonfinite,
            "num_buckets": len(self.table.flights),
            "transport": "nccl" if self.table.on_gpu else self._communicator.transport,
            **method_stats(self.table.flights),
        }

    def name_of_not_finite(self) -> str | None:
        """Return where the first value that is not finite is, or came from; ``None`` if all are. Waits for a GPU."""
        if self.finite is not None and not bool(self.finite):
            found = nonfinite_source(self.table.flights)
            if found is not None:
                return found
        name = norms.first_not_finite(self.table.gradients())
        return None if name is None else f"parameter {name!r}"

    def settle(self) -> bool:
        """Return whether the last gradients are finite, alike on all ranks. Waits for a GPU."""
        if self.finite is None:
            self.finite = all(bool(flight.exchange.finite()) for flight in self.table.flights)
        return bool(self.finite)
