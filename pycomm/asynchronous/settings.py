"""Arguments of a parameter server, checked."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pycomm import kernels
from pycomm.asynchronous.compensation import DelayCompensation, checked_compensation
from pycomm.asynchronous.modes import MODES
from pycomm.checks import count
from pycomm.compression import Compression, NoCompression
from pycomm.cost.auto import Auto, checked_method
from pycomm.optim.parameters import optimizer_parameters
from pycomm.transport.choice import version

_DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Settings:
    """Arguments of ``parameter_server``, checked; equal on all ranks."""

    servers: int
    mode: str
    staleness: int | None
    compensation: DelayCompensation | str | None
    compression: Compression | None
    quorum: int | None
    backup: int
    checkpoint: Path | None
    trace: Path | None
    replay: Path | None
    timeout: float

    def of_updates(self) -> str:
        """Return what updates depend on."""
        names = "mode", "staleness", "compensation", "compression", "quorum", "backup", "servers"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def lines(self) -> list[str]:
        return [f"{name}={value}" for name, value in vars(self).items()]


def checked_settings(
    size: int,
    *,
    servers: Any,
    mode: Any,
    staleness: Any,
    compensation: Any,
    compression: Any,
    quorum: Any,
    backup: Any,
    checkpoint: Any,
    trace: Any,
    replay: Any,
    timeout: float,
) -> Settings:
    num_workers = size - count("servers", servers, 1)
    if num_workers < 1:
        raise ValueError(f"servers={servers} of {size} ranks leaves none to work")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, wanted one of {', '.join(MODES)}")
    for name, value, wanted in (("staleness", staleness, "ssp"), ("quorum", quorum, "softsync")):
        if (value is not None) != (mode == wanted):
            raise ValueError(f'{name}={value} with mode="{mode}": it is for mode="{wanted}", which wants it')
        if value is not None:
            count(name, value, 1)
    if count("backup", backup, 0) > 0 and mode != "sync":
        raise ValueError(f'backup={backup} with mode="{mode}": it is for mode="sync"')
    if backup >= num_workers:
        raise ValueError(f"backup={backup} wants more workers than the {num_workers} that there are")
    if mode == "sync" and compensation is not None:
        raise ValueError('compensation with mode="sync", in which no gradient is stale')
    return Settings(
        servers=servers,
        mode=mode,
        staleness=staleness,
        compensation=checked_compensation(compensation),
        compression=_method(compression),
        quorum=quorum,
        backup=backup,
        checkpoint=_path("checkpoint", checkpoint),
        trace=_path("trace", trace),
        replay=_path("replay", replay),
        timeout=timeout,
    )


def _method(compression: Any) -> Compression | None:
    method = checked_method(compression)
    if isinstance(method, Auto):
        raise ValueError('compression="auto" compares what collectives cost, which a server has none of: name a method')
    return None if isinstance(method, NoCompression) else method


def _path(name: str, value: str | Path | None) -> Path | None:
    if value is not None and not isinstance(value, str | Path):
        raise TypeError(f"{name} is {value!r}, wanted a path")
    return None if value is None else Path(value)


def checked_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by name, in the optimizer's order."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, wanted a torch.nn.Module")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{type(optimizer).__name__} wants a closure, which a server cannot evaluate")
    names = {id(p): name for name, p in model.named_parameters()}
    named: dict[str, torch.Tensor] = {}
    for p in optimizer_parameters(optimizer):
        if id(p) not in names:
            raise ValueError("the optimizer has a parameter that is not in the model")
        named[names[id(p)]] = p
    left = next((name for name, p in model.named_parameters() if p.requires_grad and name not in named), None)
    if left is not None:
        raise ValueError(f"parameter {left!r} does not belong to the optimizer")
    kinds = {(p.dtype, p.device.type) for p in named.values()}
    if len(kinds) != 1 or not kinds <= {(dtype, "cpu") for dtype in _DTYPES}:
        found = ", ".join(f"{dtype} on {device}" for dtype, device in sorted(kinds, key=str)) or "none"
        raise ValueError(
            f"parameters are {found}, wanted one dtype of float32, float64 and the half types, in CPU memory"
        )
    gap = next((name for name, p in named.items() if not p.is_contiguous()), None)
    if gap is not None:
        raise ValueError(f"parameter {gap!r} is not contiguous")
    return named


def lines_of(settings: Settings, optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]) -> list[str]:
    """Return what all ranks must have in common."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    hashes = kernels.hashes([p.detach().view(-1) for p in named.values() if p.numel() > 0])
    return [
        f"pycomm {version()}",
        *settings.lines(),
        f"{type(optimizer).__name__}{groups}",
        *(f"{name}: {list(p.shape)} {p.dtype}" for name, p in named.items()),
        f"values {hashes.tolist()}",
    ]
