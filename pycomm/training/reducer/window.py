"""Scales of accumulation windows, and weights by which every sample or token counts the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pycomm.checks import bounded
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.recorder import told_with
from pycomm.compression.base import Scaling
from pycomm.errors import CommError
from pycomm.optim.loss_scaler import scale_of
from pycomm.optim.shards import Shards
from pycomm.training.reducer import clipping as norms
from pycomm.training.reducer.buckets import SentBucket, Slot
from pycomm.training.reducer.settings import Options
from pycomm.training.reductions.phase import Role, StepState
from pycomm.training.reductions.reduction import Reduction
from pycomm.worker import Work

if TYPE_CHECKING:
    from pycomm.collectives.transport.gpu import GpuWork


# First weights: the step in which ``set_weight`` is called first, and a rank without a batch does not know of it. Its
# first bucket then meets the others' sum of samples, and the transport refuses both on all ranks, before anything is
# mixed. What the ranks then tell each other says whether that is a mistake. If not, that rank uses weights, too, and
# all sum again.

WEIGHS, _JOINS = "weights", "no batch"
"""What a rank tells the others."""


def sum_first(communicator: Communicator, sums: Any) -> None:
    """Sum the samples for the first time. Collective; a job on the communication thread."""
    try:
        with communicator.channel.recorder.telling(WEIGHS):
            communicator.all_reduce(sums, "sum")
    except ValueError as error:
        if not _weigh_or_join(error):
            raise
        communicator.all_reduce(sums, "sum")


def meets_weights(
    communicator: Communicator, buckets: Sequence[SentBucket], launch: Callable[[int], Work | GpuWork]
) -> bool:
    """Launch the first bucket that ranks compare, of a rank without a batch; return whether others have weights.

    In that case the bucket is still to be launched. ``launch`` launches one of ``buckets`` by its number.
    """
    number = next(number for number, sent in enumerate(buckets) if sent.communicator is communicator)
    try:
        with communicator.channel.recorder.telling(_JOINS):
            launch(number).wait()
    except CommError:
        pass  # raised with the others' results
    except ValueError as error:
        if _weigh_or_join(error):
            buckets[number].work = None
            return True
    return False


def _weigh_or_join(error: ValueError) -> bool:
    """Return whether ``error`` is of ranks with weights and of ranks without a batch, and of no others."""
    return set(told_with(error)) == {WEIGHS, _JOINS}


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
                sum_first(self._communicator, sums)
                self._is_known = True
            return float(sums[0]), float(sums[1])

        self._sum = self._communicator.channel.submit(job)

    def mean_factor(self) -> float:
        """Return the factor that turns the accumulated gradient into a mean over this rank's own samples."""
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
    """Scales of the backward passes of one optimizer step, fixed when the last one begins, which sends.

    Attributes:
        num_idle: number of ranks that take part in this step without gradients, as newcomers do.
        loss_scale: scale of the loss of the window that is about to end; ``None`` if only the device knows it.
        length: number of passes that a function has put into it; 0 if ranks may differ in it.
        streams: on a GPU, the streams (as integers) on which the scales were computed.
        current_stream: on a GPU, returns torch's current stream there.
    """

    def __init__(
        self,
        communicator: Communicator,
        settings: Options,
        device: torch.device,
        on_gpu: bool,
        state: StepState,
        reduction: Reduction,
    ) -> None:
        self._communicator, self._settings, self._state, self._reduction = communicator, settings, state, reduction
        self._device, self._on_gpu = device, on_gpu
        # DGC clips by parameter, as it packs them; it sees only this rank's part of a DTensor.
        self._part_norm = settings.compression.clip_norm
        self.weights = SampleWeights(communicator)
        self.num_idle = 0
        self.loss_scale: float | None = None
        self.length = 0
        self.streams: set[int] = set()
        self.current_stream = communicator.channel.current_stream_of(device)

    @property
    def skips(self) -> bool:
        """Whether this rank has no batch in the present reduction, and no weight of zero says so."""
        return self._state.role is Role.SKIPS and not self.weights.in_use

    def fix_scales(self, *, with_next: bool) -> None:
        """Begin the reduction of the window, which is about to end or has ended. Collective if weights are in use."""
        if self.weights.in_use:
            self.weights.start_sum(self._state.passes, with_next)
        loss_scale = scale_of(self._settings.loss_scaler, self._device, self._on_gpu)
        if self._on_gpu:
            self.streams = {self.current_stream()}
        average, size, number = self._settings.average, self._communicator.size, self._reduction.number()
        self._begin(Scaling(size, self._relative(), loss_scale=loss_scale, average=average, step=number))

    def _begin(self, scaling: Scaling) -> None:
        self._reduction.begin(scaling, self.weights.relative if self.weights.in_use else None)

    def fix_compared(self, *, is_flushed: bool) -> None:
        """Fix what ranks compare of the window, which ends now."""
        scale, is_free = self._reduction.scaling.loss_scale, is_flushed or self.weights.in_use
        by_function = callable(self._settings.accumulate) and not is_free
        self.loss_scale = scale if isinstance(scale, float) else None
        self.length = self._state.passes + 1 if by_function else 0

    def rescale(self) -> None:
        """Adapt the scales of the window to the present number of ranks."""
        self._begin(replace(self._reduction.scaling, size=self._communicator.size, relative=self._relative()))

    def _relative(self) -> float:
        """Return the weight of a rank with gradients, where others take part without any."""
        size = self._communicator.size
        return size / (size - self.num_idle) if self.num_idle < size else 1.0

    def fix_clipping(self, slots: Sequence[Slot], shards: Shards) -> None:
        """Fix the factor that clips this rank's own gradient, before anything is sent.

        The norm of a DTensor is the norm of the whole gradient: collective over the ranks of ``shards``.
        """
        self._clip_all(slots, shards)
        if shards and self._part_norm is not None:
            relative = self.weights.relative() if self.weights.in_use else 1.0
            limit = self._part_norm / math.sqrt(self._communicator.size)
            norms.clip_parts(slots, shards, limit, replace(self._reduction.scaling, relative=relative).to_state)
            if self._on_gpu:
                self.streams.add(self.current_stream())

    def sends_early(self, shards: Shards) -> bool:
        """Return whether gradients may be sent before all have arrived, as none is clipped by a common norm."""
        return self._settings.compression.clip_local_norm is None and (self._part_norm is None or not shards)

    def _clip_all(self, slots: Sequence[Slot], shards: Shards) -> None:
        max_norm = self._settings.compression.clip_local_norm
        if max_norm is None:
            return
        squares = norms.squared_norm(slots, shards)
        norm = squares.sqrt() * self.weights.mean_factor() / self._reduction.scaling.loss_scale
        # Non-finite gradients are not clipped; they are found where they always are, after the exchange.
        factor = norms.narrowed(torch.where(torch.isfinite(norm), norms.clip_factor(norm, max_norm), 1.0), slots)
        self._begin(replace(self._reduction.scaling, clip=factor.float() if self._on_gpu else float(factor)))
        if self._on_gpu:
            self.streams.add(self.current_stream())
