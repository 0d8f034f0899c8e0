"""The object behind ``attach``: gradients in, averages out, between backward and step."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Flag, Scaling
from pycomm.compression.bucket import on_gpu
from pycomm.optim.assembly import Lane, Slot, blame, make_lanes, method_stats
from pycomm.optim.backward import BackwardWatch
from pycomm.optim.broadcast import broadcast_tensors, check_same_lines
from pycomm.optim.forward import ForwardHook
from pycomm.optim.parameters import check_parameters, optimizer_parameters
from pycomm.optim.settings import Settings
from pycomm.optim.state import gather_state, select_state

_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


def refuse_second_attach(names: dict[str, torch.Tensor]) -> None:
    """ValueError if a parameter belongs to a Reducer already."""
    for name, param in names.items():
        if any(reducer.knows(param) for reducer in _reducers):
            raise ValueError(f"parameter {name!r} is attached already: detach() the other Reducer first")


class Reducer:
    """Averages gradients over the ranks while backward runs. Made by :func:`pycomm.attach`.

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
        self._optimizer = optimizer
        self._module = module
        self._communicator = communicator
        self._settings = settings
        self._slots: dict[int, Slot] = {}
        self._frozen: dict[int, Slot] = {}
        self._lanes: list[Lane] = []
        self._handles: list[Any] = []
        self._watch = BackwardWatch(self._begin_pass, self._end_pass)
        self._num_passes = 0  # in this accumulation window
        self._num_launched = 0
        self._sending = False  # whether this pass is the last of its window
        self._scaling = Scaling(weight=1.0 / communicator.size)
        self._stats = {"steps": 0, "wait_seconds": 0.0}
        self._device = next((p.device for p in names.values()), torch.device("cpu"))
        self._on_gpu = any(on_gpu(p) for p in names.values())
        self._scale_streams: set[int] = set()  # where the loss scale was computed
        self._nonfinite_steps = torch.zeros((), dtype=torch.int64, device=self._device)
        self._committed_steps = torch.zeros((), dtype=torch.int64, device=self._device)
        self._detached = False
        self._last_stats: dict[str, Any] = {}
        # One rank that compresses nothing has nothing to do.
        self._idle = communicator.size == 1 and not settings.compression.transactional
        for name, param in names.items():
            self._frozen[id(param)] = Slot(name, param)
        self._admit_unfrozen()
        if not self._idle:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            if module is not None:
                self._handles.append(module.register_forward_pre_hook(ForwardHook(self.before_forward)))
        _reducers.add(self)

    # What a training script calls.

    def flush(self) -> None:
        """Reduce a ragged last accumulation window; before unscaling, clipping and ``step``. Collective.

        Nothing happens where no rank has gradients waiting.
        """
        self._require_attached()
        if self._idle:
            self._num_passes = 0
            return
        waiting = torch.tensor([self._num_passes], dtype=torch.int64)
        self._communicator.all_reduce(waiting, "max")
        if waiting.item() == 0:
            return
        if self._num_passes == 0:  # others have gradients: take part without any
            for slot in self._slots.values():
                slot.param.grad = None
        self._reset_pass()
        self._read_loss_scale()
        self._reduce()

    def stats(self) -> dict[str, Any]:
        """Counters since ``attach``.

        Returns:
            ``bytes_sent`` (payload bytes that this rank has handed to the transport), ``steps``
            (reductions), ``wait_seconds`` (how long ``backward()`` was held up by communication; on a
            GPU only the host's part of it, almost nothing),
            ``nonfinite_steps`` and ``last_nonfinite`` (steps in which compression state was left
            alone, and whose gradient was to blame), ``num_buckets``, ``transport``. With TopK and DGC
            also ``selections`` (of parameters), ``selections_missed`` (those for which the last step's
            threshold was none to go by, which costs another read) and their ratio ``miss_rate``.
        """
        if self._detached:
            return dict(self._last_stats)
        nonfinite_steps = int(self._nonfinite_steps.item())
        return {
            "bytes_sent": sum(lane.exchange.bytes_sent for lane in self._lanes),
            **self._stats,
            "nonfinite_steps": nonfinite_steps,
            "last_nonfinite": blame(self._lanes) if nonfinite_steps > 0 else None,
            "num_buckets": len(self._lanes),
            "transport": "nccl" if self._on_gpu else self._communicator.transport,
            **method_stats(self._lanes),
        }

    def state_dict(self) -> dict[str, Any]:
        """What compression carries from step to step on *this* rank; save it per rank.

        ``["state"][parameter_name]["residual"]`` is what this rank has not sent yet (DGC's v), as its
        contribution to the average, without the loss scale: a tensor of the parameter's shape. With
        momentum correction ``["velocity"]`` is DGC's u, in the same units; PowerSGD has ``["q"]``,
        equal on all ranks. ``rank``, ``world_size`` and ``steps``, how many were committed, stand
        beside. Loads with ``torch.load(weights_only=True)``.
        """
        self._require_attached()
        return gather_state(self._lanes, self._settings, self._communicator, int(self._committed_steps))

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]], *, strict: bool = True) -> None:
        """Take back what :meth:`state_dict` gave.

        Args:
            state: this rank's own, or the list of all ranks'. From a list of another length than the
                world size, residuals and velocities are handed out so that their sums over the ranks
                are kept.
            strict: whether missing and unknown parameters, and another method's state, are errors.

        Raises:
            ValueError: another rank's or world size's single dict, another method's, names or shapes
                that do not fit.
        """
        self._require_attached()
        chosen, steps = select_state(state, self._lanes, self._settings, self._communicator, strict)
        for lane in self._lanes:
            lane.exchange.load_state(chosen)
        self._committed_steps.fill_(steps)

    def detach(self) -> None:
        """Undo ``attach``: no hooks, ``.grad`` in ordinary memory, shared memory given back. Idempotent."""
        if self._detached:
            return
        self._last_stats = self.stats()
        self._detached = True
        for handle in self._handles:
            handle.remove()
        for slot in self._slots.values():
            if slot.lane is not None and slot.param.grad is slot.lane.bucket.views[slot.index]:
                slot.param.grad = slot.param.grad.clone(memory_format=torch.preserve_format)
        _reducers.discard(self)
        self._communicator.close()
        # The shared memory goes with its last view, not when a garbage collector gets to this object.
        self._lanes.clear()
        self._slots.clear()
        self._frozen.clear()

    # Parameters coming and going.

    def knows(self, param: torch.Tensor) -> bool:
        """Whether ``param``'s gradient is averaged here, or will be once it is unfrozen."""
        return id(param) in self._slots or id(param) in self._frozen

    def _find_new_parameters(self) -> None:
        """Notice ``add_param_group`` and unfreezing. Runs at the same points of the program on all ranks."""
        added = [p for p in optimizer_parameters(self._optimizer) if not self.knows(p)]
        if not added and not any(slot.param.requires_grad for slot in self._frozen.values()):
            return
        names = {} if self._module is None else {id(p): name for name, p in self._module.named_parameters()}
        number = len(self._slots) + len(self._frozen)
        new = {names.get(id(p), f"added.{number + i}"): p for i, p in enumerate(added)}
        check_parameters(new, self._device)
        self._frozen.update({id(p): Slot(name, p) for name, p in new.items()})
        unfrozen = [s for s in self._frozen.values() if s.param.requires_grad]
        lines = [f"{s.name}: {list(s.param.shape)} {s.param.dtype}" for s in unfrozen] + list(new)
        check_same_lines(self._communicator, lines, "new parameter")
        broadcast_tensors(self._communicator, new.values(), src=0)
        self._admit_unfrozen()

    def _admit_unfrozen(self) -> None:
        slots = [slot for slot in self._frozen.values() if slot.param.requires_grad]
        for slot in slots:
            del self._frozen[id(slot.param)]
            self._slots[id(slot.param)] = slot
        if self._idle:
            return
        self._lanes += make_lanes(slots, self._settings.compression, self._communicator, self._settings.bucket_bytes)
        for slot in slots:
            register: Any = slot.param.register_post_accumulate_grad_hook
            self._handles.append(register(self._hook_of(slot)))

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
        for slot in self._frozen.values():
            if slot.param.grad is not None and slot.param.requires_grad:
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

    def _begin_pass(self) -> None:
        self._sending = self._num_passes + 1 >= self._settings.accumulate
        self._reset_pass()
        self._read_loss_scale()

    def _reset_pass(self) -> None:
        self._num_launched = 0
        for slot in self._slots.values():
            slot.fired = 0

    def _read_loss_scale(self) -> None:
        scaler, size = self._settings.loss_scaler, self._communicator.size
        loss_scale: float | torch.Tensor = 1.0
        if scaler is not None:
            # GradScaler.get_scale() would wait for the GPU; this is the same number, there.
            scaled = scaler.scale(torch.ones((), device=self._device))
            loss_scale = scaled.float() if self._on_gpu else float(scaled)
            if self._on_gpu:
                self._scale_streams = {self._communicator.current_stream(self._device)}
        # A number of its own for this step: the count goes on while the step may still be read from.
        number = self._committed_steps.clone() if self._on_gpu else int(self._committed_steps)
        self._scaling = Scaling(1.0 / size, loss_scale, 1.0 if self._settings.average else float(size), number)

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
        elif slot.expected:
            self._launch_ready()

    def _refuse_averaging_twice(self, slot: Slot, grad: torch.Tensor) -> None:
        """Sums and error feedback of an average plus a fresh gradient mean nothing; means of it are right."""
        linear = self._settings.average and not self._settings.compression.transactional
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
        while self._num_launched < len(self._lanes) and self._lanes[self._num_launched].ready():
            self._launch(self._lanes[self._num_launched])

    def _launch_rest(self) -> None:
        while self._num_launched < len(self._lanes):
            self._launch(self._lanes[self._num_launched])

    def _launch(self, lane: Lane) -> None:
        self._num_launched += 1
        grads = [slot.param.grad for slot in lane.slots]
        scaling = self._scaling

        first = self._num_launched == 1

        def job() -> None:
            # All lanes were compared by attach: once the ranks are in the same reduction, they agree on the rest of it.
            with contextlib.nullcontext() if first or self._on_gpu else self._communicator.trusted():
                lane.exchange.exchange(grads, scaling)

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
        for slot in self._slots.values():
            slot.expected = max(slot.expected, slot.fired)
        self._num_passes += 1
        if self._sending:
            # What is known goes first: ranks differ in what they have launched by now, but not in this order.
            self._launch_rest()
            self._find_new_parameters()
            self._reduce()

    def _reduce(self) -> None:
        """Launch what is left, wait for all, hand out."""
        self._launch_rest()
        start = time.perf_counter()
        try:
            for lane in self._lanes:
                assert lane.work is not None
                lane.work.wait()
        finally:
            for lane in self._lanes:
                lane.work = None
            self._num_passes = 0
        self._finish()
        self._stats["wait_seconds"] += time.perf_counter() - start

    def _finish(self) -> None:
        stateful = any(lane.exchange.transactional for lane in self._lanes)
        finite: Flag = not stateful or self._step_is_finite()
        for lane in self._lanes:
            lane.exchange.finish(finite)
            for slot, view, used in zip(lane.slots, lane.bucket.views, lane.exchange.used(), strict=True):
                slot.param.grad = view if used else None
                slot.version = view._version
        self._stats["steps"] += 1

    def _step_is_finite(self) -> Flag:
        """Decided by what all ranks received alike, so they agree without a message."""
        flags = [lane.exchange.finite() for lane in self._lanes]
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
