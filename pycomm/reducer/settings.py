"""Settings of a Reducer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Settings:
    """Arguments of ``attach``, checked; equal on all ranks."""

    compression: Compression
    bucket_bytes: int | None
    accumulate: int | Callable[[], bool]
    average: bool
    loss_scaler: Any
    clip_local_norm: float | None = None
    algorithm: str = "auto"
    all_parameters: bool = False
    check_replicas: int = 0
    buffers: str = "local"
    on_failure: str = "raise"
    min_ranks: int = 1
    backup: int = 0
    shard: str | None = None
    full_grad: bool | None = False
    ignore: tuple[str, ...] = ()
    optimizer_state: str = "broadcast"
    per_rank: tuple[str, ...] = ()

    @property
    def survives(self) -> bool:
        """Whether the ranks that are left go on when one is lost."""
        return self.on_failure == "shrink"

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
        return [
            f"compression={self.compression!r}",
            f"bucket_mb={None if self.bucket_bytes is None else self.bucket_bytes / 2**20}",
            f"accumulate={self.passes}",
            f"average={self.average}",
            f"loss_scaler={type(self.loss_scaler).__name__}",
            f"clip_local_norm={self.clip_local_norm}",
            f"algorithm={self.algorithm}",
            f"all_parameters={self.all_parameters}",
            f"check_replicas={self.check_replicas}",
            f"buffers={self.buffers}",
            f"on_failure={self.on_failure}",
            f"min_ranks={self.min_ranks}",
            f"backup={self.backup}",
            f"shard={self.shard}",
            f"full_grad={self.full_grad}",
            f"ignore={list(self.ignore)}",
            f"optimizer_state={self.optimizer_state}",
            f"per_rank={list(self.per_rank)}",
        ]


def checked_settings(
    model: Any,
    *,
    compression: Any,
    bucket_mb: float | None,
    accumulate: int | Callable[[], bool],
    average: bool,
    loss_scaler: Any,
    clip_local_norm: float | None,
    algorithm: str,
    all_parameters: bool,
    check_replicas: int,
    buffers: str,
    on_failure: str,
    min_ranks: int,
    backup: int,
    shard: str | None,
    full_grad: bool | None,
    optimizer_state: str,
    per_rank: Iterable[str],
) -> Settings:
    """Return the arguments of ``attach`` as checked settings.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named.
    """
    settings = Settings(
        compression=checked_method(compression),
        bucket_bytes=None if bucket_mb is None else int(positive("bucket_mb", bucket_mb) * 2**20),
        accumulate=accumulate if callable(accumulate) else count("accumulate", accumulate, 1),
        average=average,
        loss_scaler=checked_scaler(loss_scaler),
        clip_local_norm=None if clip_local_norm is None else positive("clip_local_norm", clip_local_norm),
        algorithm=_name("algorithm", algorithm),
        all_parameters=all_parameters,
        check_replicas=count("check_replicas", check_replicas, 0),
        buffers=_buffers(buffers, model),
        on_failure=_on_failure(on_failure),
        min_ranks=count("min_ranks", min_ranks, 1),
        backup=count("backup", backup, 0),
        shard=_shard(shard),
        full_grad=_full_grad(full_grad),
        optimizer_state=_optimizer_state(optimizer_state),
        per_rank=_per_rank(per_rank),
    )
    _check_together(settings)
    return settings


NAMES = tuple(inspect.signature(checked_settings).parameters)[1:]
"""Arguments of ``attach`` that become settings."""


def _check_together(settings: Settings) -> None:
    """Raise ValueError if some of ``settings`` do not go with others."""
    if settings.optimizer_state == "keep":
        _check_kept_state(settings)
    if settings.backup > 0:
        _check_backup(settings)
    if settings.full_grad is not False and settings.shard is None:
        raise ValueError(f"full_grad={settings.full_grad} without shard: every rank has all averaged gradients anyway")
    if settings.shard is not None:
        _check_shard(settings)


def _check_shard(settings: Settings) -> None:
    """Raise ValueError if ``settings`` do not go with steps that the ranks take together."""
    method = type(settings.compression).__name__
    unsuitable = {
        f"compression={method}": (
            not isinstance(settings.compression, (NoCompression, FP16, BF16)),
            "a rank gets the sum of its own part only, which this method cannot send by itself; FP16 and BF16 can be",
        ),
        f'on_failure="{settings.on_failure}"': (
            settings.survives,
            "a lost rank takes its part of the step with it; go on from a checkpoint",
        ),
        f"full_grad=None, compression={method}": (
            settings.full_grad is None and not isinstance(settings.compression, NoCompression),
            "only gradients that travel as they are can be summed in the step",
        ),
        "all_parameters=True": (settings.all_parameters, "the optimizer steps its own parameters only"),
    }
    for what, (is_unsuitable, why) in unsuitable.items():
        if is_unsuitable:
            raise ValueError(f'shard="{settings.shard}" does not go with {what}: {why}')


def _check_kept_state(settings: Settings) -> None:
    """Raise ValueError if ``settings`` do not go with optimizer state that each rank has for itself."""
    unsuitable = {
        'on_failure="shrink"': (settings.survives, "a lost rank takes its share of the state with it"),
        f'shard="{settings.shard}"': (settings.shard is not None, "pycomm shares the state out by itself then"),
    }
    for what, (is_unsuitable, why) in unsuitable.items():
        if is_unsuitable:
            raise ValueError(f'optimizer_state="keep" does not go with {what}: {why}')


def _check_backup(settings: Settings) -> None:
    """Raise ValueError if ``settings`` do not go with ranks that are not waited for, whose gradients come later."""
    unsuitable = {
        f'on_failure="{settings.on_failure}"': not settings.survives,
        f"accumulate={settings.passes}": settings.accumulates,
        "a loss_scaler": settings.loss_scaler is not None,
        f"clip_local_norm={settings.clip_local_norm}": settings.clip_local_norm is not None,
        f'buffers="{settings.buffers}"': settings.buffers != "local",
    }
    for what, is_unsuitable in unsuitable.items():
        if is_unsuitable:
            raise ValueError(
                f"backup={settings.backup} does not go with {what}: it takes one backward() per step and ranks that "
                'survive failures (on_failure="shrink"), and sends gradients in a later step, as they are'
            )


OF_DISTRIBUTED_DATA_PARALLEL = {
    "broadcast_buffers": 'buffers="broadcast" does what it does in DistributedDataParallel',
    "find_unused_parameters": "leave it out, unused parameters are found by themselves",
    "static_graph": "leave it out, no graph is assumed to stay the same",
    "gradient_as_bucket_view": "leave it out, .grad always is a view of the bucket",
    "device_ids": "leave it out, gradients are averaged where the parameters are",
}
"""What stands for arguments of torch's DistributedDataParallel whose names are not near enough to be guessed."""


def _name(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, wanted a name")
    return value


def _shard(value: Any) -> str | None:
    if value not in (None, "optimizer", "parameters"):
        raise ValueError(f'shard is {value!r}, wanted "optimizer", "parameters" or None')
    return None if value is None else str(value)


def _full_grad(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"full_grad is {value!r}, wanted True, False or None")
    return value


def _optimizer_state(value: Any) -> str:
    if value not in ("broadcast", "keep"):
        raise ValueError(f'optimizer_state is {value!r}, wanted "broadcast" or "keep"')
    return str(value)


def _per_rank(value: Any) -> tuple[str, ...]:
    keys = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    if keys is None or not all(isinstance(key, str) for key in keys):
        raise TypeError(f'per_rank is {value!r}, wanted names of hyperparameters, such as ("lr",)')
    return tuple(sorted(set(keys)))


def _on_failure(value: Any) -> str:
    if value not in ("raise", "shrink"):
        raise ValueError(f'on_failure is {value!r}, wanted "raise" or "shrink"')
    return str(value)


def _buffers(mode: Any, model: Any) -> str:
    if mode not in BUFFERS:
        raise ValueError(f"buffers is {mode!r}, wanted one of {', '.join(BUFFERS)}")
    if mode != "local" and not isinstance(model, torch.nn.Module):
        raise ValueError(f"buffers={mode!r} wants the module itself, not its named_parameters()")
    return str(mode)
