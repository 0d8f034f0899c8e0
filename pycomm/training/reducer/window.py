"""Accumulation windows, counters of training, and weights by which every sample or token counts the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pycomm.checks import bounded
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import is_capturing
from pycomm.compression import DGC
from pycomm.compression.base import Flag, Scaling
from pycomm.optim.loss_scaler import scale_of
from pycomm.optim.shards import Shards
from pycomm.training.reducer import clipping as norms
from pycomm.training.reducer.buckets import Slot
from pycomm.training.reducer.settings import Options
from pycomm.worker import Work


class HostCopy:
    """Asynchronous copy of flags from a device to the host, which waits only when it reads them."""

    def __init__(self, num_flags: int, device: torch.device) -> None:
        pinned = device.type == "cuda" and torch.cuda.is_available()
        self._host = torch.zeros(num_flags, dtype=torch.bool, pin_memory=pinned)
        self._array = self._host.numpy()  # read instead of the tensor, as torch would wait for the whole device
        self._event: torch.cuda.Event | None = None

    def put(self, flags: torch.Tensor) -> None:
        """Start to copy ``flags``, on the current stream."""
        self._host.copy_(flags, non_blocking=True)
        if flags.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(flags.device))

    def get(self) -> list[bool]:
        """Wait for the last flags, and return them."""
        if self._event is not None:
            self._event.synchronize()
        flags: list[bool] = self._array.tolist()
        return flags


class TrainingProgress:
    """Counters of reductions and steps.

    Args:
        device: device that computes whether compression has committed its state; ``None`` if the host knows.

    Attributes:
        num_reductions: number of reductions that have been handed out.
        num_steps: number of reductions that ``optimizer.step()`` has used.
        is_used: whether no averages wait for a ``step()``.
    """

    def __init__(self, device: torch.device | None) -> None:
        self.num_reductions = 0
        self.num_steps = 0
        self.is_used = True
        self._step_depth = 0  # number of nested step() calls
        self._had_averages = False  # as the step began whose closure runs
        # Whether compression committed state in the last reduction; None if only the device knows.
        self._committed: bool | None = False
        self._on_device = None if device is None else HostCopy(1, device)

    def resume(self, num_reductions: int, num_steps: int) -> None:
        """Continue with the counts of another rank."""
        self.num_reductions, self.num_steps = num_reductions, num_steps

    def reduced(self, committed: Flag) -> None:
        """Note that averages have been handed out, and whether compression ``committed`` state with them."""
        self.num_reductions += 1
        self.is_used = False
        self._step_depth = 0  # a step that raised has left it
        if isinstance(committed, torch.Tensor) and is_capturing():
            self._committed = False  # the host does not see what launches of the graph commit
        elif isinstance(committed, torch.Tensor):
            assert self._on_device is not None
            self._on_device.put(committed)
            self._committed = None
        else:
            self._committed = committed

    @property
    def has_averages(self) -> bool:
        """Return whether there was a reduction since the last step; in a closure, since the step before this one."""
        return self._had_averages or not self.is_used

    def step_hook(self, require_averaged: Callable[[bool], None]) -> Callable[..., Any]:
        """Return a pre-hook for ``optimizer.step`` that calls ``require_averaged``, after each run of a closure if any.

        Its argument says whether it is called after a closure, for which the step may have changed the parameters.

        A closure runs the last backward pass of a window itself. Averages count as used before its first run, because
        some optimizers (SAM) use the existing gradients before they ask for new ones. A class that calls its base
        class's step runs the hooks twice, of which only the outermost counts.
        """

        def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._step_depth += 1
            if self._step_depth > 1:
                return None
            self._had_averages = not self.is_used
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if not callable(closure):
                require_averaged(False)
                return None
            self.stepped()
            evaluate: Callable[[], Any] = closure

            def checked_closure() -> Any:
                depth = self._step_depth
                loss = evaluate()
                self._step_depth = depth  # its reductions do not mean that the step has failed
                require_averaged(True)
                return loss

            if "closure" in kwargs:
                return args, {**kwargs, "closure": checked_closure}
            return (args[0], checked_closure, *args[2:]), kwargs

        return hook

    def leave_step(self) -> bool:
        """Note that ``step()`` has returned; return whether it was the outermost one."""
        self._step_depth = max(self._step_depth - 1, 0)
        return self._step_depth == 0

    @property
    def is_stepping(self) -> bool:
        """Return whether ``step()`` is running."""
        return self._step_depth > 0

    def stepped(self) -> None:
        """Note that ``step()`` uses the last averages."""
        if not self.is_used:
            self.is_used = True
            self.num_steps += 1

    def skipped(self) -> None:
        """Note that the step for the last averages is skipped on purpose."""
        self.is_used = True

    def require_used(self) -> bool:
        """Return whether a step has used the last averages, or will not.

        Before the first step they count as used, as some loops update parameters without ``step()``.

        Raises:
            RuntimeError: compression has counted the last gradients as applied, but no step has applied them.
        """
        if self.is_used or self.num_steps == 0:
            return True
        committed = self._committed
        if committed is None:
            assert self._on_device is not None
            committed = self._on_device.get()[0]
        if not committed:
            return False
        raise RuntimeError(
            "optimizer.step() has not used the last averaged gradients: their pass is in the residuals and velocities "
            "of compression, but in no parameter. A backward() that is not a step of this optimizer (a generator's "
            "through its discriminator, a penalty, a saliency map) belongs in `with reducer.paused():`; several "
            "passes of one step need attach(..., accumulate=n); a step that is left out on purpose needs "
            "reducer.skip_step()"
        )


class SampleWeights:
    """Number of samples behind this rank's gradients, pass by pass, and their share of all ranks' samples.

    Autograd adds up the gradients of a window's passes. With g_p the gradient of pass p's mean loss over
    n_p samples, the required result is the sum of n_p g_p. Accumulated gradients are therefore kept in units of the
    next pass's n: before that pass they are multiplied by n_before / n_next, which is 1 unless the batch
    size changes. The window's gradient is then n_last times the accumulated gradient. Divided by the sum
    of n over all passes and ranks, which takes one message of 16 bytes, it is this rank's contribution.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._is_known = False  # to all ranks, that weights are in use
        self._unit: float | None = None  # n of the accumulated gradients, or of the next pass if there are none
        self._passed = 0.0  # samples of this window's earlier passes
        self._window = 0.0  # samples of all its passes, once it is known to end
        self._sent_unit = 0.0  # n of the gradients that are sent
        self._mine = (0.0, 0)  # samples and passes of the window, as they are summed
        self._sum: Work | None = None

    @property
    def in_use(self) -> bool:
        """Return whether weights have been set at all."""
        return self._unit is not None

    @property
    def is_zero(self) -> bool:
        """Return whether the gradients accumulated on this rank have weight zero."""
        return self.in_use and self._sent_unit == 0

    def set(self, num_samples: Any, num_passes: int) -> float:
        """Set n of the next pass; return the factor by which accumulated gradients must be multiplied first."""
        wanted = "a finite number that is not negative"
        before, unit = self._unit, bounded("num_samples", num_samples, wanted, lambda n: 0 <= n < math.inf)
        if num_passes > 0 and before is None:
            raise ValueError("set_weight inside an accumulation window that began without it: call it before each pass")
        if num_passes > 0 and unit == 0:
            raise ValueError("num_samples is 0 inside an accumulation window: leave that backward() out, and flush()")
        self._unit = unit
        return 1.0 if num_passes == 0 or before == unit else (before or 0.0) / unit

    def note_pass(self) -> None:
        """Note the end of a pass that is not the last of its window."""
        self._passed += self._unit or 0.0

    def forget_passes(self) -> None:
        """Forget the passes of a window whose samples do not count."""
        self._passed = 0.0

    def start_sum(self, num_passes: int, with_next: bool) -> None:
        """Start to sum the samples of the window over all ranks. Collective.

        The message is the same whether the window ends with the next pass or has ended, as the ranks may
        differ in their numbers of passes.
        """
        mine = self._passed + ((self._unit or 0.0) if with_next else 0.0)
        self._sent_unit = (self._unit or 0.0) if num_passes > 0 or with_next else 0.0
        self._window, self._passed = mine, 0.0
        self._mine = mine, num_passes + with_next
        self.sum_again()

    def sum_again(self) -> None:
        """Start to sum the same samples over the present ranks. Collective."""
        sums = np.array(self._mine, np.float64)

        def job() -> tuple[float, float]:
            if self._is_known:
                self._communicator.all_reduce(sums, "sum")
            else:
                from pycomm.training.reducer.first_weights import sum_first

                sum_first(self._communicator, sums)
                self._is_known = True
            return float(sums[0]), float(sums[1])

        self._sum = self._communicator.channel.submit(job)

    def mean_factor(self) -> float:
        """Return the factor that turns the accumulated gradient into that of the mean over this rank's own samples."""
        return self._sent_unit / self._window if self.in_use and self._window > 0 else 1.0

    def any_passes(self) -> bool:
        """Return whether any rank has had a pass in this window. Waits for the sum."""
        assert self._sum is not None
        _, passes = self._sum.wait()
        return bool(passes > 0)

    def relative(self) -> float:
        """Return the weight of the gradients accumulated here relative to the ranks' mean weight. Waits for the sum.

        Multiplied by it, they are averaged correctly by a plain mean over the ranks.
        """
        assert self._sum is not None
        total, _ = self._sum.wait()
        if total == 0:
            raise ValueError("the weights of this step sum to zero over all ranks: there is nothing to average")
        return float(self._communicator.size * self._sent_unit / total)


class AccumulationWindow:
    """Backward passes of one optimizer step. The last one sends; the scales are fixed when it begins.

    Attributes:
        num_passes: number of passes that have ended in this window.
        holds: whether its last pass has left gradients.
        sending: whether the current (or latest) pass is the last of its window.
        complete: whether a full window has ended, and nothing has happened since.
        num_idle: number of ranks that take part in this step without gradients, as newcomers do.
        scaling: scales of the window that is being sent, except for this rank's relative weight, which
            is known only to a job on the communication thread.
        streams: on a GPU, the streams (as integers) on which the scales were computed.
        current_stream: on a GPU, returns torch's current stream there.
    """

    def __init__(self, communicator: Communicator, settings: Options, device: torch.device, on_gpu: bool) -> None:
        self._communicator, self._settings = communicator, settings
        self._device, self._on_gpu = device, on_gpu
        # DGC clips by parameter, as it packs them; it sees only this rank's part of a DTensor.
        self._part_norm = settings.compression.clip_norm if isinstance(settings.compression, DGC) else None
        self.num_passes = 0
        self.holds = self.sending = self.complete = False
        self.weights = SampleWeights(communicator)
        self.num_idle = 0
        self.scaling = Scaling(communicator.size)
        self.streams: set[int] = set()
        self.current_stream = communicator.channel.current_stream_of(device)

    @property
    def is_open(self) -> bool:
        """Return whether passes have ended whose gradients have not been sent yet."""
        return self.num_passes > 0

    def begin_pass(self) -> None:
        """Note that a pass begins; decide whether it is the last of the window."""
        self.complete = False
        self.sending = self._settings.is_last(self.num_passes)

    def end_pass(self, *, holds: bool) -> None:
        """Note that a pass has ended, and whether it has left gradients."""
        self.num_passes += 1
        self.holds = holds
        if not self.sending:
            self.weights.note_pass()

    def discard(self) -> int:
        """Forget the passes so far, as their gradients have been cleared; return their number."""
        self.weights.forget_passes()
        number, self.num_passes = self.num_passes, 0
        return number

    def close(self) -> None:
        """Note that the gradients of the window have been handed out, or lost."""
        self.num_passes = 0

    def fix_scales(self, *, with_next: bool, step: torch.Tensor) -> None:
        """Fix the scales of the window, which is about to end or has ended. Collective if weights are in use.

        Args:
            step: number of steps committed before this one, 0-d int64.
        """
        if self.weights.in_use:
            self.weights.start_sum(self.num_passes, with_next)
        loss_scale = scale_of(self._settings.loss_scaler, self._device, self._on_gpu)
        if self._on_gpu and isinstance(loss_scale, torch.Tensor):
            self.streams = {self.current_stream()}
        # A copy: the count may be incremented before the GPU has read it for this step.
        number = step.clone() if self._on_gpu else int(step)
        average, size = self._settings.average, self._communicator.size
        self.scaling = Scaling(size, self._relative(), loss_scale=loss_scale, average=average, step=number)

    def compared(self, *, is_flushed: bool) -> tuple[float | None, int]:
        """Return what ranks compare of a window that ends now: loss scale, and number of passes.

        The scale is ``None`` if only the device knows it; the number 0 if it may differ between ranks.
        """
        scale, is_free = self.scaling.loss_scale, is_flushed or self.weights.in_use
        by_function = callable(self._settings.accumulate) and not is_free
        return scale if isinstance(scale, float) else None, self.num_passes + 1 if by_function else 0

    def rescale(self) -> None:
        """Adapt the scales of the window to the present number of ranks."""
        self.scaling = replace(self.scaling, size=self._communicator.size, relative=self._relative())

    def _relative(self) -> float:
        """Return the weight of a rank with gradients, where others take part without any."""
        size = self._communicator.size
        return size / (size - self.num_idle) if self.num_idle < size else 1.0

    def fix_clipping(self, slots: Sequence[Slot], shards: Shards) -> None:
        """Fix the factor that clips this rank's own gradient, before anything is sent.

        Of DTensors, that of the whole gradient counts: collective over the ranks of ``shards``.
        """
        self._clip_all(slots, shards)
        if shards and self._part_norm is not None:
            relative = self.weights.relative() if self.weights.in_use else 1.0
            limit = self._part_norm / math.sqrt(self._communicator.size)
            norms.clip_parts(slots, shards, limit, replace(self.scaling, relative=relative).to_state)
            if self._on_gpu:
                self.streams.add(self.current_stream())

    def sends_early(self, shards: Shards) -> bool:
        """Return whether gradients may be sent before all have arrived, as none is clipped by a norm of several."""
        return self._settings.compression.clip_local_norm is None and (self._part_norm is None or not shards)

    def _clip_all(self, slots: Sequence[Slot], shards: Shards) -> None:
        max_norm = self._settings.compression.clip_local_norm
        if max_norm is None:
            return
        squares = norms.squared_norm(slots, shards)
        norm = squares.sqrt() * self.weights.mean_factor() / self.scaling.loss_scale
        # Non-finite gradients are not clipped; they are found where they always are, after the exchange.
        factor = norms.narrowed(torch.where(torch.isfinite(norm), norms.clip_factor(norm, max_norm), 1.0), slots)
        self.scaling = replace(self.scaling, clip=factor.float() if self._on_gpu else float(factor))
        if self._on_gpu:
            self.streams.add(self.current_stream())
