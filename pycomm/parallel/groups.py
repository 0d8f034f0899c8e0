"""Process groups of a mesh, and agreement of their ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.agreement import Words, agreed
from pycomm.collectives.backend.process_group import PycommProcessGroup
from pycomm.collectives.transport.own_group import group_of
from pycomm.errors import attempt, text_of
from pycomm.torch_internals import backend_of

GroupLike = dist.ProcessGroup | DeviceMesh | None

_T = TypeVar("_T")

_WORDS = Words(differ="the ranks would not {what} alike: rank 0 has {there!r}, rank {rank} {here!r}", shares_lost=True)


def group_along(mesh: GroupLike, dimension: str) -> dist.ProcessGroup:
    """Return the group of ``mesh`` along ``dimension``; of a one-dimensional mesh or a group, its only group."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call init_process_group first")
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        names = mesh.mesh_dim_names or ()
        if dimension not in names:
            raise ValueError(f"mesh has the dimensions {', '.join(names)}, wanted {dimension!r} among them")
        mesh = mesh[dimension]
    return group_of(mesh)


def cpu_or(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the CPU if ``group`` supports it, so that no GPU is waited for; else ``device``."""
    return torch.device("cpu") if "cpu:" in str(dist.get_backend_config(group)) else device


def all_gather_text(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the texts of all ranks of ``group``, the default group if ``None``. Collective; nothing is pickled."""
    ranks = group_of(group)
    device = cpu_or(ranks, torch.device("cuda"))
    data = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8).to(device)  # never empty
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks.size())]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=ranks)
    counts = [int(length) for length in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    everyone = [torch.zeros_like(padded) for _ in counts]
    dist.all_gather(everyone, padded, group=ranks)
    return [bytes(each[: count - 1].tolist()).decode() for each, count in zip(everyone, counts, strict=True)]


def agree(
    group: dist.ProcessGroup, outcome: _T | Exception, what: str, lines: Callable[[_T], list[str]] = lambda _: []
) -> _T:
    """Return this rank's outcome if every rank of ``group`` succeeded, with the same ``lines``. Collective.

    Args:
        group: the ranks.
        outcome: the result of this rank, or its error: see :func:`attempt`.
        what: what the ranks are about to do, for the message about another rank, which "could not" do it.
        lines: description of the result, which must be the same on all ranks.

    Raises:
        ValueError: on every rank: another rank had an error, or another description, of which the first
            line that differs is named. This rank's own error is raised as it is.
    """

    def gather(mine: bytes) -> list[bytes]:
        return [text.encode() for text in all_gather_text(mine.decode(), group)]

    return agreed(gather, outcome, what, lambda made: {"": lines(made)}, _WORDS)


def reporting(group: dist.ProcessGroup, make: Callable[[], _T]) -> _T:
    """Return the result of ``make``, which calls no collective.

    If it raises on the backend "pycomm", the next collective of ``group`` raises on the other ranks.
    """
    made = attempt(make)
    if isinstance(made, Exception):
        backend = backend_of(group, torch.device("cpu"))
        if isinstance(backend, PycommProcessGroup):
            backend.engine.channel.refuse(text_of(made))
        raise made
    return made
