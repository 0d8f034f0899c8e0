"""Checked arguments of a parameter server, and the files that they name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pycomm import kernels
from pycomm.checks import count
from pycomm.collectives.transport.choice import version
from pycomm.compression.base import Compression
from pycomm.descriptions import settings_text
from pycomm.optim.parameter_checks import refuse_overlaps
from pycomm.optim.parameters import optimizer_parameters
from pycomm.torch_internals import by_plain_names
from pycomm.training.asynchronous.arguments import named_method
from pycomm.training.asynchronous.core import Core, Piece, StateSpec, cut, group_sizes, is_elementwise, shard_dtype
from pycomm.training.asynchronous.modes import Mode, Sync, checked_mode
from pycomm.training.asynchronous.server_checkpoint import ServerCheckpoint
from pycomm.training.reducer import checked_buffers
from pycomm.untrusted import naming, open_output, path_of

KEYS = ("event", "worker", "number")
"""Keys that identify an event of a worker."""


class Trace:
    """Trace written to ``path``, one event per line. The file keeps its old content until :meth:`begin`."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_output(path)

    def begin(self) -> None:
        """Begin the trace, in an empty file."""
        self._file.truncate(0)

    def write(self, event: dict[str, Any]) -> None:
        with naming(self._path):
            self._file.write(json.dumps({key: event[key] for key in KEYS if key in event}).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


_DTYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class ServerSettings:
    """Checked arguments of ``parameter_server``, equal on all ranks."""

    servers: int
    mode: Mode
    compression: Compression | None
    checkpoint: Path | None
    trace: Path | None
    buffers: str
    timeout: float

    def of_updates(self) -> str:
        """Return the settings that updates depend on."""
        return f"mode={settings_text(self.mode)}, compression={self.compression}, servers={self.servers}"


def checked_settings(
    size: int,
    timeout: float,
    *,
    servers: Any = 1,
    mode: Any = "async",
    compression: Any = None,
    checkpoint: Any = None,
    trace: Any = None,
    buffers: Any = "local",
) -> ServerSettings:
    num_workers = size - count("servers", servers, 1)
    if num_workers < 1:
        raise ValueError(f"servers={servers} of {size} ranks leaves none to work")
    mode = checked_mode(mode)
    if isinstance(mode, Sync) and mode.backup >= num_workers:
        raise ValueError(f"backup={mode.backup} requires more workers than the {num_workers} of this job")
    paths = {"checkpoint": checkpoint, "trace": trace}
    checked = {name: _path(name, path) for name, path in paths.items()}
    method = named_method(compression, "compares the costs of collectives, and a server has none")
    buffers = checked_buffers(buffers, torch.nn.Module())
    return ServerSettings(servers, mode, method, buffers=buffers, timeout=timeout, **checked)


def _path(name: str, value: str | Path | None) -> Path | None:
    if value is not None and not isinstance(value, str | Path):
        raise TypeError(f"{name} is {value!r}, wanted a path")
    return None if value is None else path_of(value)


def checked_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by name, in the optimizer's order."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, wanted a torch.nn.Module")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{type(optimizer).__name__} requires a closure, which a server cannot evaluate")
    every = by_plain_names(model, dict(model.named_parameters()))
    names = {id(p): name for name, p in every.items()}
    named: dict[str, torch.Tensor] = {}
    for p in optimizer_parameters(optimizer):
        if id(p) not in names:
            raise ValueError("the optimizer has a parameter that is not in the model")
        named[names[id(p)]] = p
    left = next((name for name, p in every.items() if p.requires_grad and name not in named), None)
    if left is not None:
        raise ValueError(f"parameter {left!r} does not belong to the optimizer")
    kinds = {(p.dtype, p.device.type) for p in named.values()}
    if len(kinds) != 1 or not kinds <= {(dtype, "cpu") for dtype in _DTYPES}:
        found = ", ".join(f"{dtype} on {device}" for dtype, device in sorted(kinds, key=str)) or "none"
        raise ValueError(
            f"parameters are {found}, wanted one dtype of float32, float64 and the half types, in CPU memory"
        )
    refuse_overlaps(named, "parameter_server()", model.named_buffers())
    gap = next((name for name, p in named.items() if not p.is_contiguous()), None)
    if gap is not None:
        raise ValueError(f"parameter {gap!r} is not contiguous")
    return named


def lines_of(settings: ServerSettings, optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor]) -> list[str]:
    """Return what must be the same on all ranks."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    hashes = kernels.hashes([p.detach().view(-1) for p in named.values() if p.numel() > 0])
    return [
        f"pycomm {version()}",
        *(f"{name}={value}" for name, value in vars(settings).items()),
        f"{type(optimizer).__name__}{groups}",
        *(f"{name}: {list(p.shape)} {p.dtype}" for name, p in named.items()),
        f"values {hashes.tolist()}",
    ]


class ServerFiles:
    """Files of one server. The constructor reads and checks them, and changes none.

    Args:
        settings: settings that name the files.
        server: number of the server.
        wanted: form of state that the server accepts.

    Attributes:
        trace: trace to write, or ``None``.
        checkpoint: checkpoints to restart from, and to write, or ``None``.
    """

    def __init__(self, settings: ServerSettings, server: int, wanted: StateSpec) -> None:
        self.checkpoint: ServerCheckpoint | None = None
        self.trace: Trace | None = None
        if settings.checkpoint is not None:
            self.checkpoint = ServerCheckpoint(settings.checkpoint / f"server-{server}", wanted)
        if settings.trace is not None:
            self.trace = Trace(settings.trace.with_name(f"{settings.trace.name}.{server}"))

    def begin(self, core: Core) -> None:
        """Load the saved state into ``core``, if there is one, and begin the trace."""
        if self.trace is not None:
            self.trace.begin()
        if self.checkpoint is not None:
            self.checkpoint.load(core)

    def close(self) -> None:
        if self.trace is not None:
            self.trace.close()


def shards_of(
    settings: ServerSettings, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]
) -> list[list[Piece]]:
    """Return the pieces of the parameters that each server holds."""
    anywhere = is_elementwise(optimizer) and settings.compression is None  # compression depends on shapes
    return cut([p.numel() for p in params], settings.servers, anywhere=anywhere)


def state_spec_of(
    settings: ServerSettings, optimizer: torch.optim.Optimizer, pieces: Sequence[Piece], dtype: torch.dtype
) -> StateSpec:
    """Return the form of state of the server that will hold ``pieces`` of parameters of ``dtype``."""
    size = sum(piece.size for piece in pieces)
    groups = group_sizes(optimizer, pieces)
    return StateSpec(settings.of_updates(), size, shard_dtype(dtype), groups, settings.mode.rules().state().keys())
