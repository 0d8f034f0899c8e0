"""Meshes of devices, placed so that most communication stays inside hosts; their groups, and agreement of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.agreement import Words, agreed
from pycomm.checks import count, flag, instance
from pycomm.collectives.backend.process_group import PycommProcessGroup
from pycomm.collectives.transport.own_group import group_of
from pycomm.collectives.transport.rendezvous import host_identity
from pycomm.errors import attempt, text_of
from pycomm.torch_internals import backend_of

DIMENSIONS = ("pp", "dp", "ep", "tp")
"""Dimensions of a mesh, from the outermost to the innermost: stages, replicas, experts, parts of an operator."""

GroupLike = dist.ProcessGroup | DeviceMesh | None

_T = TypeVar("_T")

_WORDS = Words(differ="the ranks differ on how to {what}: rank 0 has {there!r}, rank {rank} {here!r}", shares_lost=True)


def group_along(mesh: GroupLike, dimension: str) -> dist.ProcessGroup:
    """Return the group of ``mesh`` along ``dimension``; of a one-dimensional mesh or a group, its only group."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call init_process_group first")
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        names = mesh.mesh_dim_names or ()
        if dimension not in names:
            raise ValueError(f"mesh has the dimensions {', '.join(names)}, wanted {dimension!r} among them")
        mesh = mesh[dimension]
    return group_of(mesh, "mesh")


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


@dataclass(frozen=True)
class _MeshRequest:
    """Checked arguments of :func:`mesh`, with sizes by dimension, outermost first."""

    sizes: tuple[tuple[str, int], ...]
    device_type: str
    tp_between_hosts: bool

    def lines(self) -> list[str]:
        """Return what must be the same on all ranks."""
        sizes = ", ".join(f"{name} = {size}" for name, size in self.sizes)
        return [sizes, self.device_type, f"tp_between_hosts = {self.tp_between_hosts}"]


def mesh(
    *,
    pp: int | None = None,
    dp: int | None = None,
    ep: int | None = None,
    tp: int | None = None,
    device_type: str | None = None,
    tp_between_hosts: bool = False,
) -> DeviceMesh:
    """Return a mesh over all ranks of the default group, with the dimensions that were given.

    Collective over all ranks. The dimensions are ordered pp, dp, ep, tp from the outermost to the innermost,
    whatever the order of the arguments, and each has groups on the default group's backend. Ranks are placed host by
    host, so that the ranks of a tp group share a host; so do an ep group's ranks if hosts have room for whole groups.
    This is because each split layer communicates several times per step, but stages and replicas only once.

        mesh = pycomm.parallel.mesh(dp=2, tp=2)
        pycomm.parallel.split(model, mesh, "auto")
        pycomm.attach(optimizer, model, process_group=mesh["dp"])

    Args:
        pp: number of stages of the pipeline; without the dimension if ``None``, as for the others.
        dp: number of replicas.
        ep: number of ranks that a layer of experts is split over (:class:`pycomm.parallel.Experts`).
        tp: number of ranks that an operator is split over (:func:`pycomm.parallel.split`).
        device_type: "cpu" or "cuda"; if ``None``, "cuda" where torch finds GPUs that the default group serves.
        tp_between_hosts: allow tp groups that reach over several hosts, if hosts have no room for whole ones.

    Returns:
        The mesh; ``mesh["dp"]`` is one dimension of it.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError, ValueError: a size is no whole number of at least 1, the sizes do not multiply to the number of
            ranks, tp does not fit into the hosts, or the ranks ask for different meshes (on every rank, before any
            group is made).
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized: call torch.distributed.init_process_group() first "
            "(under torchrun, or with rank and world_size)"
        )
    sizes_given = {"pp": pp, "dp": dp, "ep": ep, "tp": tp}
    request = attempt(lambda: _checked(sizes_given, device_type, tp_between_hosts))
    world = group_of(None)
    agreed = agree(world, request, "make this mesh", _MeshRequest.lines)
    hosts = all_gather_text(host_identity(), world)
    names, sizes = zip(*agreed.sizes, strict=True)
    ranks = place(hosts, dict(agreed.sizes).get("tp", 1), agreed.tp_between_hosts)
    return DeviceMesh(agreed.device_type, torch.tensor(ranks).view(*sizes), mesh_dim_names=names)


def place(hosts: Sequence[str], tp: int, tp_between_hosts: bool = False) -> list[int]:
    """Return the ranks in the order in which they fill a mesh whose innermost dimension has the size ``tp``.

    Args:
        hosts: host of each rank; equal texts are the same host.
        tp: number of neighbors that must be on one host.
        tp_between_hosts: whether they may be on several hosts if that is impossible.
    """
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    sizes = [len(ranks) for ranks in by_host.values()]
    if any(size % tp for size in sizes) and not tp_between_hosts:
        raise ValueError(
            f"tp is {tp}, but hosts have {', '.join(map(str, sizes))} ranks: wanted multiples of tp, so that each "
            "split layer stays inside a host (tp_between_hosts=True allows otherwise)"
        )
    # Whole groups first: the hosts' remaining ranks come last, so that they split no other group.
    whole = [ranks[: len(ranks) // tp * tp] for ranks in by_host.values()]
    left_over = [ranks[len(ranks) // tp * tp :] for ranks in by_host.values()]
    return list(itertools.chain(*whole, *left_over))


def group_over(mesh: DeviceMesh, *dimensions: str) -> dist.ProcessGroup:
    """Return the group of this rank over several dimensions of ``mesh`` at once, such as "dp" and "ep".

    Collective over all ranks of the default group, each time it is called: keep what it returns. Its ranks are in
    rising order; it is the default group itself if it has all ranks.

    Raises:
        TypeError, ValueError: ``mesh`` is none, lacks a dimension, or one is named twice; or the ranks ask for
            different groups. On every rank.
    """
    made_of = attempt(lambda: _rows(mesh, dimensions))
    rows = agree(group_of(None), made_of, "make this group", lambda each: [str(each)])
    if len(rows) == 1:
        return group_of(None)
    rank = dist.get_rank()
    made: list[dist.ProcessGroup] = [dist.new_group(row) for row in rows]
    return next(group for group, row in zip(made, rows, strict=True) if rank in row)


def _rows(mesh: Any, dimensions: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each group over ``dimensions``. Raises TypeError or ValueError if there is none."""
    instance("mesh", mesh, DeviceMesh)
    names = mesh.mesh_dim_names or ()
    for name in dimensions:
        if name not in names or dimensions.count(name) > 1:
            raise ValueError(f"dimensions are {list(dimensions)}, wanted different ones of the mesh's: {list(names)}")
    if not dimensions:
        raise ValueError(f"no dimension was given, wanted any of {', '.join(names)}")
    chosen = [names.index(name) for name in dimensions]
    others = [i for i in range(len(names)) if i not in chosen]
    size = math.prod(mesh.mesh.shape[i] for i in chosen)
    rows: list[list[int]] = mesh.mesh.permute(*others, *chosen).reshape(-1, size).tolist()
    return rows


def _checked(sizes: dict[str, int | None], device_type: str | None, between: bool) -> _MeshRequest:
    """Return this rank's request. Raise TypeError or ValueError if an argument is wrong."""
    given = tuple((name, count(name, sizes[name], 1)) for name in DIMENSIONS if sizes[name] is not None)
    if not given:
        raise ValueError(f"no dimension was given, wanted any of {', '.join(DIMENSIONS)}")
    product, world = math.prod(size for _, size in given), dist.get_world_size()
    if product != world:
        said = " x ".join(f"{name}={size}" for name, size in given)
        raise ValueError(f"{said} makes {product} ranks, but the world has {world}")
    flag("tp_between_hosts", between)
    if device_type is None:
        served = "cuda" in str(dist.get_backend_config(group_of(None)))
        device_type = "cuda" if served and torch.cuda.is_available() else "cpu"
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type is {device_type!r}, wanted 'cpu' or 'cuda'")
    return _MeshRequest(given, device_type, between)
