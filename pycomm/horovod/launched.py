"""Who this process is, and where it meets the others, by what its launcher has put into the environment."""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.horovod import meeting
from pycomm.torch_internals import PrefixStore, Store
from pycomm.transport.addresses import loopback, store_on_loopback

_LAUNCHERS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", ("HOROVOD_GLOO_RENDEZVOUS_PORT",)),
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", ()),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ("PMI_ID",)),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
"""Variables of rank, of size, of the number of ranks on this host, and of what tells jobs of this host apart.

srun alone sets the number of tasks of a step: a script that a batch job runs by itself is one process.
"""
_FIRST_PORT, _PORTS = 20000, 12000


@dataclass(frozen=True)
class Launched:
    """What a launcher says: this process's rank, the number of ranks, and how to get the store where they meet."""

    rank: int
    size: int
    store: Callable[[float], Store | None]


def launched() -> Launched:
    """Return what the environment says; a world of one if it says nothing.

    Raises:
        ValueError: it says something that makes no sense.
    """
    for rank_name, size_name, local_name, job in _LAUNCHERS:
        if rank_name in os.environ and size_name in os.environ:
            rank, size = _integer(rank_name), _integer(size_name)
            if not 0 <= rank < size:
                raise ValueError(f"{rank_name} is {rank} and {size_name} is {size} in the environment: no such rank")
            is_local = size == 1 or (os.environ.get(local_name, "").isdecimal() and _integer(local_name) == size)
            return Launched(rank, size, functools.partial(_store, rank, size, is_local, job))
    return Launched(0, 1, lambda _: None)


def by_mpi(comm: Any) -> Launched:
    """Return what an mpi4py communicator says."""
    return Launched(comm.Get_rank(), comm.Get_size(), lambda patience: _store_by_mpi(comm, patience))


def _integer(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r} in the environment, wanted a number that is not negative")
    return int(text)


def _store(rank: int, size: int, is_local: bool, job: tuple[str, ...], patience: float) -> Store | None:
    if size == 1:
        return None
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        port = _integer("MASTER_PORT")
        store: Store = _tcp(os.environ["MASTER_ADDR"], port, rank == 0 and not served, patience)
        # torchrun gives all its starts one store, in which ranks that are gone have left their addresses.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"start {start}", store) if served else store
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ and "HOROVOD_GLOO_RENDEZVOUS_PORT" in os.environ:
        server = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], _integer("HOROVOD_GLOO_RENDEZVOUS_PORT")
        return _store_by_address(rank, patience, lambda mine: meeting.through_horovodrun(server, mine, patience))
    if is_local:
        name = "/".join(os.environ.get(variable, "") for variable in job) or str(os.getppid())
        return _store_on_this_host(name, rank, size, patience)
    nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_JOB_NODELIST", ""))
    if nodes and "SLURM_JOB_ID" in os.environ:
        port = _FIRST_PORT + _integer("SLURM_JOB_ID") % _PORTS
        return _tcp(first_node(nodes), port, rank == 0, patience)
    raise ValueError(
        f"the launcher says that this is rank {rank} of {size}, but not where the ranks meet: set MASTER_ADDR to a "
        "name of rank 0's host and MASTER_PORT to a free port of it, on all ranks (mpirun -x ...)"
    )


def _tcp(host: str, port: int, serves: bool, patience: float) -> Store:
    return TCPStore(host, port, None, serves, timedelta(seconds=patience), wait_for_workers=False, multi_tenant=True)


def _store_by_address(rank: int, patience: float, exchange: Callable[[str | None], str]) -> Store:
    """Return the store that rank 0 serves at a free port, which ``exchange`` tells the others."""
    if rank > 0:
        host, port = exchange(None).rsplit(":", 1)
        return _tcp(host, int(port), False, patience)
    store = _tcp(loopback(), 0, True, patience)
    assert isinstance(store, TCPStore)
    exchange(f"{socket.gethostname()}:{store.port}")
    return store


def _store_on_this_host(job: str, rank: int, size: int, patience: float) -> Store:
    """Return the store that rank 0 serves on the loopback device, for the ranks of one host."""
    store = store_on_loopback(timedelta(seconds=patience)) if rank == 0 else None
    port = meeting.on_this_host(job, rank, "" if store is None else str(store.port), size, patience)
    return store or _tcp(loopback(), int(port), False, patience)


def _store_by_mpi(comm: Any, patience: float) -> Store | None:
    if comm.Get_size() == 1:
        return None
    return _store_by_address(comm.Get_rank(), patience, lambda mine: str(comm.bcast(mine, root=0)))


def first_node(nodes: str) -> str:
    """Return the first of Slurm's list of hosts: "a[03-05,9],b" begins with "a03"."""
    found = re.match(r"([^,\[]*)(?:\[([^\],\-]+)[^\]]*\]([^,]*))?", nodes)
    assert found is not None
    return "".join(part or "" for part in found.groups())
