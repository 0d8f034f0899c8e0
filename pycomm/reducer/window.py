"""Accumulation window: the backward passes between two optimizer steps, and the scales of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from pycomm.communicator import Communicator
from pycomm.compression import DGC
from pycomm.compression.base import Scaling
from pycomm.optim.loss_scaler import loss_scale_of
from pycomm.optim.shards import Shards
from pycomm.reducer import norms
from pycomm.reducer.buckets import Slot
from pycomm.reducer.sample_weights import SampleWeights
from pycomm.reducer.settings import Settings


class AccumulationWindow:
    """Backward passes of one optimizer step. The last one sends; the scales are fixed when it begins.

    Attributes:
        num_passes: number of passes that have ended in this window.
        sending: whether the current (or latest) pass is the last of its window.
        complete: whether a full window has ended, and nothing has happened since.
        num_idle: number of ranks that take part in this step without gradients, as newcomers do.
        weights: weights by the number of samples behind each pass.
        scaling: scales of the window that is being sent, except for this rank's relative weight, which
            is known only to a job on the communication thread.
        streams: on a GPU, the streams (as integers) on which the scales were computed.
    """

    def __init__(self, communicator: Communicator, settings: Settings, device: torch.device, on_gpu: bool) -> None:
        self._communicator, self._settings = communicator, settings
        self._device, self._on_gpu = device, on_gpu
        self._loss_scale = loss_scale_of(settings.loss_scaler)
        # DGC clips by parameter, as it packs them; it sees only this rank's part of a DTensor.
        self._part_norm = settings.compression.clip_norm if isinstance(settings.compression, DGC) else None
        self.num_passes = 0
        self.sending = False
        self.complete = False
        self.weights = SampleWeights(communicator)
        self.num_idle = 0
        self.scaling = Scaling(communicator.size)
        self.streams: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Return whether passes have ended whose gradients have not been sent yet."""
        return self.num_passes > 0

    def begin_pass(self) -> None:
        """Note that a pass begins; decide whether it is the last of the window."""
        self.complete = False
        self.sending = self._settings.is_last(self.num_passes)

    def end_pass(self) -> None:
        """Note that a pass has ended."""
        self.num_passes += 1
        if not self.sending:
            self.weights.note_pass()

    def close(self) -> None:
        """Note that the gradients of the window have been handed out, or lost."""
        self.num_passes = 0

    def fix_scales(self, *, with_next: bool, step: torch.Tensor) -> None:
        """Fix the scales of the window, which is about to end or has ended. Collective if weights are in use.

        Args:
            with_next: whether the next pass belongs to the window.
            step: number of steps committed before this one, 0-d int64.
        """
        if self.weights.in_use:
            self.weights.start_sum(self.num_passes, with_next)
        loss_scale = self._loss_scale.current(self._device, self._on_gpu)
        if self._on_gpu and isinstance(loss_scale, torch.Tensor):
            self.streams = {self._communicator.channel.current_stream(self._device)}
        # A copy: the count may be incremented before the GPU has read it for this step.
        number = step.clone() if self._on_gpu else int(step)
        average, size = self._settings.average, self._communicator.size
        self.scaling = Scaling(size, self._relative(), loss_scale=loss_scale, average=average, step=number)

    def rescale(self) -> None:
        """Go on with the number of ranks that there are now, with the scales of the window as they were otherwise."""
        self.scaling = replace(self.scaling, size=self._communicator.size, relative=self._relative())

    def _relative(self) -> float:
        """Return the weight of a rank that has gradients, where others take part without any."""
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
                self.streams.add(self._communicator.channel.current_stream(self._device))

    def sends_early(self, shards: Shards) -> bool:
        """Return whether gradients may be sent before all have arrived: none is clipped by what others know."""
        return self._settings.clip_local_norm is None and (self._part_norm is None or not shards)

    def _clip_all(self, slots: Sequence[Slot], shards: Shards) -> None:
        max_norm = self._settings.clip_local_norm
        if max_norm is None:
            return
        squares = norms.squared_norm(slots, shards)
        norm = squares.sqrt() * self.weights.mean_factor() / self.scaling.loss_scale
        # Non-finite gradients are not clipped; they are found where they always are, after the exchange.
        factor = norms.narrowed(torch.where(torch.isfinite(norm), norms.clip_factor(norm, max_norm), 1.0), slots)
        self.scaling = replace(self.scaling, clip=factor.float() if self._on_gpu else float(factor))
        if self._on_gpu:
            self.streams.add(self._communicator.channel.current_stream(self._device))
