"""The engine behind ``attach``: gradients in, averages out, between backward and step."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Flag, Scaling
from pycomm.compression.bucket import on_gpu
from pycomm.optim import gradients
from pycomm.optim.assembly import Lane, Slot
from pycomm.optim.backward import BackwardWatch
from pycomm.optim.forward import ForwardHook
from pycomm.optim.fused import fused_step_of
from pycomm.optim.roster import Roster
from pycomm.optim.scaler import LossScaler
from pycomm.optim.settings import Settings
from pycomm.optim.weighting import SampleWeights


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
        self._module = module
        self._communicator = communicator
        self._settings = settings
        self._roster = Roster(optimizer, names, module, communicator, settings)
        self._handles: list[Any] = []
        self._watch = BackwardWatch(self._begin_pass, self._end_pass)
        self._num_passes = 0  # in this accumulation window
        self._num_launched = 0
        self._sending = False  # whether this pass is the last of its window
        self._complete = False  # whether a full window ended, and nothing has happened since
        self._scaling = Scaling(communicator.size)
        self._weights = SampleWeights(communicator)
        self._stats = {"steps": 0, "wait_seconds": 0.0}
        self._device = self._roster.device
        self._on_gpu = any(on_gpu(p) for p in names.values())
        self._scale_streams: set[int] = set()  # where the loss scale, or the clipping factor, was computed
        self._nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self._device)
        self._committed_steps = torch.zeros((), dtype=torch.int64, device=self._device)
        self._finite: Flag | None = None  # the last step, where compression had to know
        self._measures = False  # whether norms are taken as gradients are received
        self._detached = False
        self._last_stats: dict[str, Any] = {}
        # One rank that compresses nothing has nothing to do.
        self._idle = communicator.size == 1 and not settings.compression.transactional and not settings.clip_local_norm
        if self._idle:
            self._roster.admit()
        else:
            self._install()

    def _install(self) -> None:
        self._idle = False
        self._admit(self._roster.slots())
        self._admit(self._roster.admit())
        self._handles.append(self.optimizer.register_step_pre_hook(self._before_step))
        if self._module is not None:
            self._handles.append(self._module.register_forward_pre_hook(ForwardHook(self.before_forward)))

    # Parameters coming and going.

    def knows(self, param: torch.Tensor) -> bool:
        """Whether ``param``'s gradient is averaged here, or will be once it is unfrozen."""
        return self._roster.knows(param)

    def _find_new_parameters(self) -> None:
        if self._roster.find_new():
            self._admit(self._roster.admit())

    def _admit(self, slots: list[Slot]) -> None:
        self._roster.make_lanes(slots)
        for slot in slots:
            register_hook: Any = slot.param.register_post_accumulate_grad_hook
            self._handles.append(register_hook(self._hook_of(slot)))

    def before_forward(self) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint recomputes inside backward
        self._forget_abandoned_pass()
        if self._num_passes == 0:
            self._find_new_parameters()

    def _before_step(self, *_: object) -> None:
        # Sends nothing: distributed checkpointing calls step() on its own to create optimizer state.
        self._forget_abandoned_pass()
        if self._num_passes > 0:
            raise RuntimeError(
                f"optimizer.step() after {self._num_passes} of {self._settings.accumulate} backward passes: these "
                "gradients have not been averaged; call reducer.flush() first"
            )
        for slot in self._roster.unfrozen():
            if slot.param.grad is not None:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} has not been averaged: it was unfrozen after attach, and no "
                    "parameter that pycomm already knew took part in this backward; attach the module itself, not its "
                    "named_parameters()"
                )

    # A pass.

    def _hook_of(self, slot: Slot) -> Any:
        def on_grad(_param: torch.Tensor) -> None:
            self._watch.touch()
            self._on_grad(slot)

        return on_grad

    def _flush(self) -> None:
        if self._weights.in_use:
            self._fix_units(with_next=False)
            if not self._weights.anybody():
                return
        else:
            waiting = torch.tensor([self._num_passes], dtype=torch.int64)
            self._communicator.all_reduce(waiting, "max")
            if waiting.item() == 0:
                return
            self._fix_units(with_next=False)
        if self._num_passes == 0:  # others have gradients: take part without any
            for slot in self._roster.slots():
                slot.param.grad = None
        self._reset_pass()
        self._reduce()

    def _begin_pass(self) -> None:
        self._complete = False
        self._sending = self._num_passes + 1 >= self._settings.accumulate
        self._reset_pass()
        if self._sending:
            self._fix_units(with_next=True)

    def _reset_pass(self) -> None:
        self._num_launched = 0
        for slot in self._roster.slots():
            slot.fired = 0
        for lane in self._roster.lanes:
            lane.measured = False

    def _fix_units(self, with_next: bool) -> None:
        """What gradients of this window are multiplied with, which ends with the next pass, or has ended."""
        if self._weights.in_use:
            self._weights.share(self._num_passes, with_next)
        scaler = self._settings.loss_scaler
        loss_scale: float | torch.Tensor = 1.0
        if isinstance(scaler, LossScaler):
            loss_scale = scaler.get_scale()
        elif scaler is not None:
            # GradScaler.get_scale() would wait for the GPU; this is the same number, there.
            scaled = scaler.scale(torch.ones((), device=self._device))
            loss_scale = scaled.float() if self._on_gpu else float(scaled)
            if self._on_gpu:
                self._scale_streams = {self._communicator.current_stream(self._device)}
        # A number of its own for this step: the count goes on while the step may still be read from.
        number = self._committed_steps.clone() if self._on_gpu else int(self._committed_steps)
        average, size = self._settings.average, self._communicator.size
        self._scaling = Scaling(size, loss_scale=loss_scale, average=average, number=number)

    def _fix_clip(self) -> None:
        """Before anything is sent: the whole gradient must be known."""
        max_norm = self._settings.clip_local_norm
        if max_norm is None or self._num_launched > 0:
            return
        squares = gradients.squared_norm([], self._roster.slots())
        norm = squares.sqrt() * self._weights.mean_factor() / self._scaling.loss_scale
        # What is not finite stays so, and is found where it always is.
        factor = torch.where(torch.isfinite(norm), gradients.clip_factor(norm, max_norm), 1.0).float()
        self._scaling = replace(self._scaling, clip=factor if self._on_gpu else float(factor))
        if self._on_gpu:
            self._scale_streams.add(self._communicator.current_stream(self._device))

    def _on_grad(self, slot: Slot) -> None:
        lane, grad = slot.lane, slot.param.grad
        assert lane is not None
        assert grad is not None
        slot.fired += 1
        if self._on_gpu:
            lane.producers.add(self._communicator.current_stream(self._device))
        if grad.is_sparse:
            raise ValueError(f"the gradient of {slot.name!r} is sparse; pycomm reduces dense gradients")
        if lane.work is not None:
            raise RuntimeError(
                f"the gradient of {slot.name!r} was accumulated {slot.fired} times in one backward pass, where earlier "
                f"passes had {slot.expected}, and had been sent already; detach() and attach() again to learn anew"
            )
        self._refuse_averaging_twice(slot, grad)
        if not self._sending:
            self._adopt(slot, grad)
        elif slot.expected and self._settings.clip_local_norm is None:
            self._launch_ready()

    def _refuse_averaging_twice(self, slot: Slot, grad: torch.Tensor) -> None:
        """Sums and error feedback of an average plus a fresh gradient mean nothing; means of it are right."""
        settings = self._settings
        linear = settings.average and not settings.compression.transactional and settings.clip_local_norm is None
        if linear or self._num_passes > 0 or slot.fired > 1:
            return
        assert slot.lane is not None
        if grad is slot.lane.bucket.views[slot.index] and grad._version == slot.version + 1:
            raise RuntimeError(
                f"backward() ran again on the averaged gradient of {slot.name!r}: zero the gradients first, or pass "
                "attach(..., accumulate=n) for n backward passes per step"
            )

    def _adopt(self, slot: Slot, grad: torch.Tensor) -> None:
        """Let later passes of this window accumulate in the bucket itself."""
        assert slot.lane is not None
        view = slot.lane.bucket.views[slot.index]
        if grad is not view and not slot.lane.bucket.holds(slot.index, grad):
            view.copy_(grad)
            slot.param.grad = view

    def _launch_ready(self) -> None:
        while self._num_launched < len(self._roster.lanes) and self._roster.lanes[self._num_launched].ready():
            self._launch(self._roster.lanes[self._num_launched])

    def _launch_rest(self) -> None:
        self._fix_clip()
        while self._num_launched < len(self._roster.lanes):
            self._launch(self._roster.lanes[self._num_launched])

    def _launch(self, lane: Lane) -> None:
        self._num_launched += 1
        weighted, scaling = self._weights.in_use, self._scaling
        grads = [None if self._weights.nothing_here else slot.param.grad for slot in lane.slots]
        measures = self._measures and not lane.exchange.transactional
        if weighted and self._on_gpu:
            self._weights.relative()  # the host waits here; on the communication thread nobody needs to
        first = self._num_launched == 1

        def job() -> None:
            units = replace(scaling, relative=self._weights.relative()) if weighted else scaling
            # All lanes were compared by attach: once the ranks are in the same reduction, they agree on the rest of it.
            with contextlib.nullcontext() if first or self._on_gpu else self._communicator.trusted():
                lane.exchange.exchange(grads, units)
            if measures:
                gradients.measure(lane)

        if self._on_gpu:
            producers = lane.producers | self._scale_streams
            lane.work = self._communicator.submit_on_gpu(self._device, job, grads, producers)
            lane.producers = set()
        else:
            lane.work = self._communicator.submit(job)
        for slot, view in zip(lane.slots, lane.bucket.views, strict=True):
            if slot.param.grad is not None:
                slot.param.grad = view  # frees what autograd allocated as soon as it is packed

    def _end_pass(self) -> None:
        for slot in self._roster.slots():
            slot.expected = max(slot.expected, slot.fired)
        self._num_passes += 1
        if not self._sending:
            self._weights.note_pass()
        else:
            # What is known goes first: ranks differ in what they have launched by now, but not in this order.
            self._launch_rest()
            self._find_new_parameters()
            self._reduce()
            self._complete = True

    def _reduce(self) -> None:
        """Launch what is left, wait for all, hand out."""
        self._launch_rest()
        start = time.perf_counter()
        try:
            for lane in self._roster.lanes:
                assert lane.work is not None
                lane.work.wait()
        finally:
            for lane in self._roster.lanes:
                lane.work = None
            self._num_passes = 0
        self._finish()
        self._stats["wait_seconds"] += time.perf_counter() - start

    def _finish(self) -> None:
        stateful = any(lane.exchange.transactional for lane in self._roster.lanes)
        self._finite = self._step_is_finite() if stateful else None
        finite: Flag = True if self._finite is None else self._finite
        for lane in self._roster.lanes:
            lane.exchange.finish(finite)
            for slot, view, used in zip(lane.slots, lane.bucket.views, lane.exchange.used(), strict=True):
                slot.param.grad = view if used else None
                slot.version = view._version
        self._stats["steps"] += 1
        if (fused := fused_step_of(self.optimizer)) is not None:
            fused.forget()  # whatever was left for a step that did not come was of other gradients

    def _step_is_finite(self) -> Flag:
        """Decided by what all ranks received alike, so they agree without a message."""
        flags = [lane.exchange.finite() for lane in self._roster.lanes]
        finite = torch.stack([torch.as_tensor(flag) for flag in flags]).all()
        self._nonfinite_steps += ~finite
        self._committed_steps += finite
        return finite if self._on_gpu else bool(finite)

    def _forget_abandoned_pass(self) -> None:
        if not self._watch.abandoned():
            return
        if self._num_launched:
            raise RuntimeError(
                "the last backward() ended with an exception after part of its gradients had been sent: the ranks are "
                "out of step; restart from a checkpoint"
            )

    def _require_attached(self) -> None:
        if self._detached:
            raise RuntimeError("this Reducer is detached")
