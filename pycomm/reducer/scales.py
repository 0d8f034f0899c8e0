"""What the gradients of an accumulation window are multiplied with, fixed when its last pass begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Scaling
from pycomm.optim.loss_scaler import LossScaler
from pycomm.reducer import norms
from pycomm.reducer.buckets import Slot
from pycomm.reducer.sample_weights import SampleWeights
from pycomm.reducer.settings import Settings


class Units:
    """Loss scale, the rank's share of the samples, and the factor that brings its own gradient in bounds.

    Attributes:
        scaling: of the current window; without the share, which only a job on the communication thread waits for.
        streams: on a GPU, those on which it was computed, as integers.
    """

    def __init__(self, communicator: Communicator, settings: Settings, device: torch.device, on_gpu: bool) -> None:
        self._communicator, self._settings = communicator, settings
        self._device, self._on_gpu = device, on_gpu
        self.weights = SampleWeights(communicator)
        self.scaling = Scaling(communicator.size)
        self.streams: set[int] = set()

    def fix(self, num_passes: int, with_next: bool, committed_steps: torch.Tensor) -> None:
        """The window ends with the next pass, or has ended, after ``num_passes``. Collective if weights are in use."""
        if self.weights.in_use:
            self.weights.share(num_passes, with_next)
        scaler = self._settings.loss_scaler
        loss_scale: float | torch.Tensor = 1.0
        if isinstance(scaler, LossScaler):
            loss_scale = scaler.get_scale()
        elif scaler is not None:
            # GradScaler.get_scale() would wait for the GPU; this is the same number, there.
            scaled = scaler.scale(torch.ones((), dtype=torch.float32, device=self._device))
            loss_scale = scaled.float() if self._on_gpu else float(scaled)
            if self._on_gpu:
                self.streams = {self._communicator.channel.current_stream(self._device)}
        # A number of its own for this step: the count goes on while the step may still be read from.
        step = committed_steps.clone() if self._on_gpu else int(committed_steps)
        average, size = self._settings.average, self._communicator.size
        self.scaling = Scaling(size, loss_scale=loss_scale, average=average, step=step)

    def fix_clip(self, slots: Sequence[Slot]) -> None:
        """Before anything is sent: the whole gradient must be known."""
        max_norm = self._settings.clip_local_norm
        if max_norm is None:
            return
        squares = norms.squared_norm([], slots)
        norm = squares.sqrt() * self.weights.mean_factor() / self.scaling.loss_scale
        # What is not finite stays so, and is found where it always is.
        factor = norms.narrowed(torch.where(torch.isfinite(norm), norms.clip_factor(norm, max_norm), 1.0), slots)
        self.scaling = replace(self.scaling, clip=factor.float() if self._on_gpu else float(factor))
        if self._on_gpu:
            self.streams.add(self._communicator.channel.current_stream(self._device))
