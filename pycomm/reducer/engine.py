"""The engine behind ``attach``: gradients in, averages out, between backward and step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Flag
from pycomm.layout import on_gpu
from pycomm.optim.fused import fused_step_of
from pycomm.reducer import norms
from pycomm.reducer.autograd_hooks import ForwardHook, GradientHook, before_step
from pycomm.reducer.backward import BackwardWatch
from pycomm.reducer.buckets import Lane, Slot
from pycomm.reducer.gradient_checks import require_no_average, require_sendable
from pycomm.reducer.local_passes import LocalPasses
from pycomm.reducer.module_buffers import BufferSync
from pycomm.reducer.parameters import Roster
from pycomm.reducer.progress import Progress
from pycomm.reducer.replicas import Agreement
from pycomm.reducer.scales import Units
from pycomm.reducer.settings import Settings
from pycomm.reducer.uncovered import Uncovered
from pycomm.reducer.wrappers import refuse_active_wrapper
from pycomm.transport.gpu import GpuWork
from pycomm.worker import Work

_HALF_SENT = (
    "the last backward() ended with an exception after part of its gradients had been sent: the ranks are out of step; "
    "restart from a checkpoint"
)


class Reduction:
    """Averages gradients over the ranks while backward runs; :class:`Reducer` is its public face.

    How a step goes: a hook on each parameter notes that its gradient is there. When all of a
    bucket's are, and all buckets before it have been launched, the bucket is handed to the
    communication thread, which packs and exchanges it while backward goes on. When ``backward()`` is
    about to return it launches what is left (parameters that this step did not use), waits, and
    leaves views of the buckets in ``.grad``. The very first pass only learns how often each gradient
    is accumulated (parameters shared between checkpointed pieces: several times) and launches
    everything at its end.

    On a GPU the communication thread is a stream, and waiting means that the stream on which
    ``backward()`` was called waits: the host goes on. It waits only in steps in which this rank has
    no gradient for some parameter, to learn whether another has.

    It lives as long as the optimizer, or the module that was given: their hooks hold it, those of the
    parameters do not.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[str, torch.Tensor],
        module: torch.nn.Module | None,
        communicator: Communicator,
        settings: Settings,
    ) -> None:
        self.optimizer = optimizer
        self.module = module  # that attach was given, unless it was names
        self._communicator = communicator
        self._settings = settings
        self._roster = Roster(optimizer, names, module, communicator, settings)
        self._handles: list[Any] = []
        self._watch = BackwardWatch(self._begin_pass, self._gradients_are_there, self._end_pass, self._pass_failed)
        self._num_passes = 0  # in this accumulation window
        self._num_launched = 0
        self._sending = False  # whether this pass is the last of its window
        self._complete = False  # whether a full window ended, and nothing has happened since
        self._firing: Slot | None = None  # whose hooks are being called
        self._late: Slot | None = None  # whose .grad is to be its view, once its hooks have been called
        self._stopped = ""  # why this rank takes part no more
        self._wait_seconds = 0.0
        self._device = self._roster.device
        self._on_gpu = any(on_gpu(p) for p in names.values())
        self._units = Units(communicator, settings, self._device, self._on_gpu)
        self._local = LocalPasses()
        self._progress = Progress(self._device if self._on_gpu else None)
        self._agreement = Agreement(
            communicator,
            self._device,
            settings.check_replicas,
            not self._on_gpu,
            self._roster.named,
            self._named_buffers,
        )
        self._nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self._device)
        self._committed_steps = torch.zeros((), dtype=torch.int64, device=self._device)
        self._finite: Flag | None = None  # the last step, where compression had to know
        self._measures = False  # whether norms are taken as gradients are received
        self._uncovered: Uncovered | None = None
        self._buffers: BufferSync | None = None
        self._buffer_work: Work | GpuWork | None = None
        # One rank that compresses nothing has nothing to do.
        self._idle = communicator.size == 1 and not settings.compression.transactional and not settings.clip_local_norm
        if self._idle:
            self._roster.admit()
            return
        try:
            self._install()
        except BaseException:
            self._uninstall()
            raise

    def _install(self) -> None:
        self._idle = False
        self._admit(self._roster.slots())
        self._admit(self._roster.admit())
        self._handles.append(
            self.optimizer.register_step_pre_hook(before_step(self._require_averaged, self._progress.stepped))
        )
        if self.module is not None:
            self._handles.append(self.module.register_forward_pre_hook(ForwardHook(self.before_forward)))
            self._uncovered = Uncovered(self.module, self.knows)
            if self._settings.buffers != "local":
                self._buffers = BufferSync(self.module, self._settings.buffers, self._communicator)

    def _uninstall(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._buffers = None
        if self._uncovered is not None:
            self._uncovered.close()

    def knows(self, param: torch.Tensor) -> bool:
        """Whether ``param``'s gradient is averaged here, or will be once it is unfrozen."""
        return self._roster.knows(param)

    def named_parameters(self) -> dict[str, torch.Tensor]:
        """All that are averaged here, or will be once they are unfrozen."""
        return dict(self._roster.named())

    def _named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Those that nothing makes equal; the others differ until the reduction ends."""
        return [] if self.module is None or self._buffers is not None else list(self.module.named_buffers())

    def _find_new_parameters(self) -> None:
        if self._roster.find_new():
            self._admit(self._roster.admit())

    def _admit(self, slots: list[Slot]) -> None:
        self._roster.make_lanes(slots)
        for slot in slots:
            slot.hook = GradientHook(self, Reduction._on_hook, slot, slot.param)
            self._handles.append(slot.hook)

    def before_forward(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint recomputes inside backward
        refuse_active_wrapper(self.named_parameters)
        self._forget_abandoned_pass()
        if self._num_passes == 0 and not self._stopped and not self._local.depth:
            self._find_new_parameters()

    def _require_averaged(self) -> None:
        # Sends nothing: distributed checkpointing calls step() on its own to create optimizer state.
        self._forget_abandoned_pass()
        if self._num_passes > 0:
            raise RuntimeError(
                f"optimizer.step() after {self._num_passes} of {self._settings.accumulate} backward passes: these "
                "gradients have not been averaged; call reducer.flush() first"
            )
        self._local.require_gone("optimizer.step() would move this rank's parameters alone")
        self._roster.require_no_unknown_gradients()
        self._progress.stepped()

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        if self._num_passes > 0:
            raise RuntimeError("paused() inside an accumulation window: its gradients would be mixed; flush() first")
        self._local.depth += 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def _on_hook(self, slot: Slot) -> None:
        if self._local.depth > 0:
            self._local.note(slot)
            return
        self._firing = slot
        try:
            self._watch.touch()
            self._on_grad(slot)
        except (RuntimeError, ValueError) as error:
            self._stop(error)
            raise
        finally:
            self._firing = None

    def _flush(self) -> None:
        self._require_taking_part()
        if self._units.weights.in_use:
            self._units.fix(self._num_passes, False, self._committed_steps)
            if not self._units.weights.anybody():
                return
        else:
            waiting = torch.tensor([self._num_passes], dtype=torch.int64)
            self._communicator.all_reduce(waiting, "max")
            if waiting.item() == 0:
                return
            self._units.fix(self._num_passes, False, self._committed_steps)
        if self._num_passes == 0:  # others have gradients: take part without any
            for slot in self._roster.slots():
                slot.param.grad = None
        self._reset_pass()
        self._reduce()

    def _begin_pass(self) -> None:
        self._forget_abandoned_pass()
        self._complete = False
        self._sending = self._num_passes + 1 >= self._settings.accumulate
        self._require_right_pass()
        self._reset_pass()
        if self._sending:
            self._agreement.look_back(self._progress.num_steps, self._progress.num_reductions)
            self._units.fix(self._num_passes, True, self._committed_steps)

    def _require_taking_part(self) -> None:
        if self._stopped:
            raise RuntimeError(f"this Reducer takes part no more since an earlier error: {self._stopped}")

    def _require_right_pass(self) -> None:
        self._require_taking_part()
        self._local.require_gone("this backward() would add to it", self._firing)
        if self._num_passes == 0 and not self._settings.all_parameters:  # whose optimizers are several
            self._progress.require_used()
        self._roster.require_as_attached()

    def _stop(self, error: Exception) -> None:
        """Tell the other ranks, who are on their way to this reduction or in it, and leave."""
        if self._stopped or self._communicator.size == 1 or torch.compiler.is_compiling():
            return
        self._stopped = str(error)
        in_flight = any(lane.work is not None for lane in self._roster.lanes)
        self._communicator.channel.abandon(self._stopped, in_step=not in_flight)

    def _reset_pass(self) -> None:
        self._num_launched, self._late = 0, None
        for lane in self._roster.lanes:
            lane.begin_pass()

    def _on_grad(self, slot: Slot) -> None:
        slot.fire()
        require_sendable(slot)
        lane = slot.lane
        assert lane is not None
        late, self._late = self._late, None
        if late is not None:
            late.show_bucket()
        if self._on_gpu:
            lane.producers.add(self._communicator.channel.current_stream(self._device))
        if self._num_passes == 0:
            require_no_average(slot, self._settings)
        if not self._sending:
            slot.adopt()
        elif slot.expected and self._settings.clip_local_norm is None:
            self._launch_ready()

    def _launch_ready(self) -> None:
        firing = self._firing
        if firing is not None and firing.hook is not None and not firing.hook.is_last(firing.param):
            return  # the gradient may not be what it will be: with the next one, or when all are there
        while self._num_launched < len(self._roster.lanes) and self._roster.lanes[self._num_launched].ready():
            self._launch(self._roster.lanes[self._num_launched])

    def _launch_rest(self) -> None:
        if self._num_launched == 0:
            self._units.fix_clip(self._roster.slots())
        while self._num_launched < len(self._roster.lanes):
            self._launch(self._roster.lanes[self._num_launched])
        if self._buffers is not None and self._buffer_work is None:
            self._buffer_work = self._submit(self._buffers.run, [], set())

    def _launch(self, lane: Lane) -> None:
        self._num_launched += 1
        weights, scaling = self._units.weights, self._units.scaling
        weighted, first = weights.in_use, self._num_launched == 1
        grads = [None if weights.nothing_here else slot.param.grad for slot in lane.slots]
        measures = self._measures and not lane.exchange.transactional
        if weighted and self._on_gpu:
            weights.relative()  # the host waits here; on the communication thread nobody needs to
        progress = self._progress
        fingerprint = self._agreement.fingerprint(progress.num_steps, progress.num_reductions) if first else None

        def job() -> None:
            units = replace(scaling, relative=weights.relative()) if weighted else scaling
            if fingerprint is not None:
                units = replace(units, fingerprint=fingerprint())
            # All lanes were compared by attach: once the ranks are in the same reduction, they agree on the rest of it.
            with contextlib.nullcontext() if first or self._on_gpu else self._communicator.channel.skip_checks():
                lane.exchange.exchange(grads, units)
            if measures:
                norms.measure(lane)

        lane.work = self._submit(job, grads, lane.producers | self._units.streams)
        lane.producers = set()
        for slot in lane.slots:
            if slot is self._firing:
                self._late = slot  # hooks that are called after ours, DistributedDataParallel's say, want its gradient
            else:
                slot.show_bucket()  # frees what autograd allocated as soon as it is packed

    def _submit(self, job: Callable[[], None], reads: list[torch.Tensor | None], producers: set[int]) -> Work | GpuWork:
        if self._on_gpu:
            return self._communicator.channel.submit_on_gpu(self._device, job, reads, producers)
        return self._communicator.channel.submit(job)

    def _gradients_are_there(self) -> None:
        if self._sending:
            # What is known goes first: ranks differ in what they have launched by now, but not in this order.
            self._launch_rest()

    def _end_pass(self) -> None:
        for slot in self._roster.slots():
            slot.expected = max(slot.expected, slot.fired)
        self._num_passes += 1
        if not self._sending:
            self._units.weights.note_pass()
        else:
            self._find_new_parameters()
            self._reduce()
            self._complete = True
        if self._uncovered is not None:
            self._uncovered.warn()

    def _reduce(self) -> None:
        """Launch what is left, wait for all, hand out."""
        self._launch_rest()
        start = time.perf_counter()
        self._late = None
        try:
            for lane in self._roster.lanes:
                assert lane.work is not None
                lane.work.wait()
            if self._buffer_work is not None:
                self._buffer_work.wait()
            self._finish()
        except BaseException:
            for slot in self._roster.slots():
                slot.param.grad = None  # no average, and nobody is to take it for one
            raise
        finally:
            for lane in self._roster.lanes:
                lane.work = None
            self._buffer_work = None
            self._num_passes = 0
        self._wait_seconds += time.perf_counter() - start

    def _finish(self) -> None:
        lanes, progress = self._roster.lanes, self._progress
        if lanes:
            self._agreement.look(lanes[0].exchange.differing(), progress.num_steps, progress.num_reductions)
        stateful = any(lane.exchange.transactional for lane in lanes)
        self._finite = self._step_is_finite() if stateful else None
        finite: Flag = True if self._finite is None else self._finite
        for lane in lanes:
            lane.exchange.finish(finite)
            lane.bucket.repair()
            for slot, view, used in zip(lane.slots, lane.bucket.views, lane.exchange.used(), strict=True):
                slot.param.grad = view if used else None
                slot.version = view._version
            lane.bucket.note_handed_out()
        progress.reduced(False if self._finite is None else self._finite)
        if (fused := fused_step_of(self.optimizer)) is not None:
            fused.forget()  # whatever was left for a step that did not come was of other gradients

    def _step_is_finite(self) -> Flag:
        """Decided by what all ranks received alike, so they agree without a message."""
        flags = [lane.exchange.finite() for lane in self._roster.lanes]
        finite = torch.stack([torch.as_tensor(flag) for flag in flags]).all()
        self._nonfinite_steps += ~finite
        self._committed_steps += finite
        return finite if self._on_gpu else bool(finite)

    def _pass_failed(self) -> None:
        if self._num_launched > 0:
            self._stop(RuntimeError(_HALF_SENT))

    def _forget_abandoned_pass(self) -> None:
        if not self._watch.abandoned() or self._num_launched == 0:
            return
        if self._communicator.size > 1:
            raise RuntimeError(_HALF_SENT)
        for lane in self._roster.lanes:  # nobody else waits for the rest
            if lane.work is not None:
                lane.work.wait()
                lane.work = None
        for slot in self._roster.slots():
            slot.param.grad = None
        self._num_launched = 0
