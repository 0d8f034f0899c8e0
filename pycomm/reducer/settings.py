"""Settings of a Reducer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from pycomm.checks import count, positive
from pycomm.compression import (
    BF16,
    FP16,
    Compression,
    NoCompression,
)
from pycomm.cost.auto import checked_method
from pycomm.optim.loss_scaler import checked_scaler
from pycomm.reducer.module_buffers import BUFFERS
from pycomm.reducer.options import Sharding, Survive, Tuning, checked_option


@dataclass(frozen=True)
class Settings:
    """Arguments of ``attach``, checked; equal on all ranks."""

    compression: Compression
    accumulate: int | Callable[[], bool] = 1
    loss_scaler: Any = None
    average: bool = True
    clip_local_norm: float | None = None
    buffers: str = "local"
    all_parameters: bool = False
    survive: Survive | None = None
    shard: Sharding | None = None
    tuning: Tuning = field(default_factory=Tuning)

    @classmethod
    def checked(
        cls,
        model: Any,
        *,
        compression: Any,
        accumulate: Any,
        loss_scaler: Any,
        clip_local_norm: Any,
        buffers: Any,
        survive: Any,
        shard: Any,
        tuning: Any,
        **flags: bool,
    ) -> Settings:
        """Return the arguments of ``attach`` as settings.

        Raises:
            TypeError, ValueError: an argument is wrong, or does not go with others; it is named.
        """
        shard = Sharding(shard) if isinstance(shard, str) else shard
        tuning = checked_option("tuning", tuning, Tuning, "pycomm.Tuning(bucket_mb=...)")
        settings = cls(
            compression=checked_method(compression),
            accumulate=accumulate if callable(accumulate) else count("accumulate", accumulate, 1),
            loss_scaler=checked_scaler(loss_scaler),
            clip_local_norm=None if clip_local_norm is None else positive("clip_local_norm", clip_local_norm),
            buffers=_buffers(buffers, model),
            survive=checked_option("survive", survive, Survive, "pycomm.Survive(min_ranks=...)"),
            shard=checked_option("shard", shard, Sharding, '"optimizer", "parameters", pycomm.Sharding(...)'),
            tuning=Tuning() if tuning is None else tuning,
            **flags,
        )
        _check_together(settings)
        return settings

    @property
    def backup(self) -> int:
        """Number of ranks that need not be waited for."""
        return 0 if self.survive is None else self.survive.backup

    @property
    def accumulates(self) -> bool:
        """Whether a step may have several backward passes."""
        return self.accumulate != 1

    @property
    def passes(self) -> str:
        """The number of backward passes per step, or who says so."""
        return "several (a function says)" if callable(self.accumulate) else str(self.accumulate)

    def is_last(self, num_passes: int) -> bool:
        """Return whether the pass that begins after ``num_passes`` others is the last one of its step."""
        if callable(self.accumulate):
            return bool(self.accumulate())
        return num_passes + 1 >= self.accumulate

    def lines(self) -> list[str]:
        """Return one line per setting, to be compared between the ranks."""
        texts = {"accumulate": self.passes, "loss_scaler": type(self.loss_scaler).__name__}
        return [f"{each.name}={texts.get(each.name, getattr(self, each.name))}" for each in fields(self)]


def _check_together(settings: Settings) -> None:
    """Raise ValueError if some of ``settings`` do not go with others."""
    if settings.tuning.optimizer_state == "keep":
        _check_kept_state(settings)
    if settings.backup > 0:
        _check_backup(settings)
    if settings.shard is not None:
        _check_shard(settings, settings.shard)


def _check_shard(settings: Settings, shard: Sharding) -> None:
    """Raise ValueError if ``settings`` do not go with steps that the ranks take together."""
    method = type(settings.compression).__name__
    unsuitable = {
        f"compression={method}": (
            not isinstance(settings.compression, (NoCompression, FP16, BF16)),
            "a rank gets the sum of its own part only, which this method cannot send by itself; FP16 and BF16 can be",
        ),
        f"survive={settings.survive}": (
            settings.survive is not None,
            "a lost rank takes its part of the step with it; go on from a checkpoint",
        ),
        f'grads="local" and compression={method}': (
            shard.grads == "local" and not isinstance(settings.compression, NoCompression),
            "only gradients that travel as they are can be summed in the step",
        ),
        "all_parameters=True": (settings.all_parameters, "the optimizer steps its own parameters only"),
    }
    for what, (is_unsuitable, why) in unsuitable.items():
        if is_unsuitable:
            raise ValueError(f'shard="{shard.kind}" does not go with {what}: {why}')


def _check_kept_state(settings: Settings) -> None:
    """Raise ValueError if ``settings`` do not go with optimizer state that each rank has for itself."""
    unsuitable = {
        f"survive={settings.survive}": (settings.survive, "a lost rank takes its share of the state with it"),
        f"shard={settings.shard}": (settings.shard, "pycomm shares the state out by itself then"),
    }
    for what, (option, why) in unsuitable.items():
        if option is not None:
            raise ValueError(f'optimizer_state="keep" does not go with {what}: {why}')


def _check_backup(settings: Settings) -> None:
    """Raise ValueError if ``settings`` do not go with ranks that are not waited for, whose gradients come later."""
    unsuitable = {
        f"accumulate={settings.passes}": settings.accumulates,
        "a loss_scaler": settings.loss_scaler is not None,
        f"clip_local_norm={settings.clip_local_norm}": settings.clip_local_norm is not None,
        f'buffers="{settings.buffers}"': settings.buffers != "local",
    }
    for what, is_unsuitable in unsuitable.items():
        if is_unsuitable:
            raise ValueError(
                f"backup={settings.backup} does not go with {what}: it requires one backward() per step, and sends "
                "gradients in a later step, as they are"
            )


OF_DISTRIBUTED_DATA_PARALLEL = {
    "broadcast_buffers": 'buffers="broadcast" does what it does in DistributedDataParallel',
    "find_unused_parameters": "leave it out, unused parameters are found by themselves",
    "static_graph": "leave it out, no graph is assumed to stay the same",
    "gradient_as_bucket_view": "leave it out, .grad always is a view of the bucket",
    "device_ids": "leave it out, gradients are averaged where the parameters are",
}
"""What stands for arguments of torch's DistributedDataParallel whose names are not near enough to be guessed."""


def _buffers(mode: Any, model: Any) -> str:
    if mode not in BUFFERS:
        raise ValueError(f"buffers is {mode!r}, wanted one of {', '.join(BUFFERS)}")
    if mode != "local" and not isinstance(model, torch.nn.Module):
        raise ValueError(f"buffers={mode!r} requires the module itself, not its named_parameters()")
    return str(mode)
