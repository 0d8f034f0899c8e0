"""Initialization and shutdown, ranks, and available backends."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from pycomm.agreement import exchanged
from pycomm.collectives.communicator import Communicator
from pycomm.errors import CommError, attempt
from pycomm.horovod.environment import USUAL_WAITS, Launched, by_mpi, is_served, launched, meeting_seconds, waits
from pycomm.horovod.process_sets import (
    Members,
    ProcessSet,
    World,
    engine_over,
    global_process_set,
    known_world,
    open_sets,
    ranks_of_comm,
    set_world,
    world,
)
from pycomm.horovod.timeline import Timeline, begin_by_environment
from pycomm.tools.launching import store_of_start
from pycomm.torch_internals import PrefixStore, Store

_stores: dict[str, Store | None] = {}
"""The store of this process's launcher, kept because ranks that call ``init()`` again meet in it again."""
_beginnings: list[int] = [0]


def init(comm: Sequence[int] | Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Initialize. All ranks must call it; calling it again changes nothing until ``shutdown()``.

    If torch.distributed is initialized, its default group is used. Otherwise rank, number of ranks and meeting place
    come from the launcher: ``HOROVOD_RANK`` and ``HOROVOD_SIZE`` (horovodrun), torchrun, Open MPI, MPICH and
    derivatives, Slurm's srun; without a launcher, this process is the only rank.

    Args:
        comm: global ranks of the world, this one among them; or an mpi4py communicator; all ranks if ``None``.
        process_sets: :class:`ProcessSet` objects to activate, the same on all ranks; "dynamic" for none. Sets can be
            added later in any case.

    Raises:
        ValueError, TypeError: an argument or a variable of the environment is wrong, or the ranks disagree.
        CommError: a rank does not arrive.
    """
    if known_world() is not None:
        if process_sets and not isinstance(process_sets, str):
            raise ValueError("process_sets: Horovod is initialized already; call add_process_set()")
        return
    owns_group = not (dist.is_available() and dist.is_initialized())
    sets = attempt(lambda: _checked(process_sets, comm, owns_group))
    if owns_group:
        _make_group(comm)
    try:
        here = _open_world(owns_group)
    except BaseException:
        if owns_group:
            dist.destroy_process_group()
        raise
    try:
        open_sets(sets, here)
    except BaseException:
        shutdown()
        raise


def shutdown() -> None:
    """Shut down. Other ranks' unfinished operations with this one fail. ``init()`` starts again."""
    here = known_world()
    if here is not None and here.pid == os.getpid():
        leave_world("Horovod has been shut down", keep_group=not here.owns_group)


def leave_world(reason: str, keep_group: bool = False) -> None:
    """Leave the world, sending waiting ranks the ``reason``; ``keep_group``: keep torch's process group."""
    here = world()
    for known in here.on_shutdown:
        if (method := known()) is not None:
            method()
    set_world(None)
    for members in here.sets.values():
        members.close(reason)
    here.timeline.stop()
    here.handles.clear()
    global_process_set.ranks = []
    if not keep_group and dist.is_initialized():
        dist.destroy_process_group()


def begin_among(communicator: Communicator) -> None:
    """Open a world of the ranks of ``communicator``, in a new process group. Collective; CommError if one is lost."""
    place = communicator.place
    store = PrefixStore("pycomm/horovod", place.store)
    try:
        _init_process_group(store, place.rank, place.size)
        _open_world(True)
    except BaseException as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        if isinstance(error, RuntimeError) and not isinstance(error, CommError):
            raise CommError.during("init", str(error), rank=place.rank) from None
        raise


def _init_process_group(store: Store, rank: int, size: int) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    patience = timedelta(seconds=meeting_seconds())
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)


def is_initialized() -> bool:
    """Return whether ``init()`` has been called, and ``shutdown()`` has not since."""
    return known_world() is not None


def _checked(process_sets: Any, comm: Any, owns_group: bool) -> list[ProcessSet]:
    """Return the sets. Raises TypeError or ValueError if they or ``comm`` are wrong."""
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f"process_sets is {process_sets!r}, wanted a list of ProcessSet objects or 'dynamic'")
        process_sets = ()
    sets = list(process_sets or ())
    for made in sets:
        if not isinstance(made, ProcessSet):
            raise TypeError(f"process_sets has a {type(made).__name__}, wanted ProcessSet objects")
    if comm is not None and not owns_group:
        ranks = sorted(comm) if isinstance(comm, Iterable) else ranks_of_comm(comm)
        if ranks and list(ranks) != list(range(dist.get_world_size())):
            raise ValueError("comm: torch.distributed is initialized already, and its default group is the world")
    return sets


def _make_group(comm: Any) -> None:
    """Initialize torch.distributed among the ranks of ``comm``."""
    patience = meeting_seconds()
    if comm is not None and not isinstance(comm, Iterable):
        said: Launched = by_mpi(comm)
        ranks = list(range(said.size))
    else:
        said = launched()
        ranks = sorted(comm or range(said.size))
    if said.rank not in ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < said.size:
        raise ValueError(f"comm is {comm!r}, wanted ranks of 0 to {said.size - 1}, among them {said.rank}, this one")
    if "" not in _stores:
        _stores[""] = said.store(patience)
    _beginnings[0] += 1
    name = f"pycomm/horovod/{_beginnings[0]}/{'-'.join(map(str, ranks)) if len(ranks) < said.size else 'all'}"
    store: Store = HashStore() if _stores[""] is None else PrefixStore(name, _stores[""])
    if is_served():
        store = store_of_start(store, ranks.index(said.rank), len(ranks), patience)
    _init_process_group(store, ranks.index(said.rank), len(ranks))


def _open_world(owns_group: bool) -> World:
    """Open the world of torch's default group. Collective."""
    group = dist.group.WORLD
    assert group is not None
    size, rank = dist.get_world_size(), dist.get_rank()
    timeline = Timeline()
    found = attempt(waits)
    limits = USUAL_WAITS if isinstance(found, Exception) else found
    here = World(rank, size, [], [], [], *limits, timeline, owns_group)
    here.sets[0] = everybody = Members(list(range(size)), group)
    everybody.engine = engine_over(group, "global", here)
    try:
        begun: Any = found if isinstance(found, Exception) else None
        if begun is None and rank == 0:
            begun = attempt(lambda: begin_by_environment(timeline))
        gather = everybody.engine.communicator.channel.all_gather_bytes
        host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        _find_hosts(here, exchanged(gather, begun, "use its environment", lambda _: host))
    except BaseException as error:
        timeline.stop()
        everybody.close(str(error))
        raise
    global_process_set.ranks = list(range(size))
    set_world(here)
    return here


def _find_hosts(here: World, hosts: Sequence[str]) -> None:
    ranks_by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_by_host.setdefault(host, []).append(rank)
    here.local = ranks_by_host[hosts[here.rank]]
    here.hosts = [len(ranks) for ranks in ranks_by_host.values()]
    mine = here.local.index(here.rank)
    here.cross = [ranks[mine] for ranks in ranks_by_host.values() if len(ranks) > mine]


# Who this process is.


def rank() -> int:
    """Return this process's rank."""
    return world().rank


def size() -> int:
    """Return the number of ranks."""
    return world().size


def local_rank() -> int:
    """Return this process's rank among the ranks of its host, counted from 0."""
    here = world()
    return list(here.local).index(here.rank)


def local_size() -> int:
    """Return the number of ranks on this host."""
    return len(world().local)


def cross_rank() -> int:
    """Return the number of this host among those that have a rank with this one's local rank."""
    here = world()
    return list(here.cross).index(here.rank)


def cross_size() -> int:
    """Return how many hosts have a rank with this one's local rank."""
    return len(world().cross)


def is_homogeneous() -> bool:
    """Return whether all hosts have equally many ranks."""
    return len(set(world().hosts)) == 1


# What is there.


def mpi_threads_supported() -> bool:
    """Raise ValueError: MPI is not in use."""
    raise ValueError("MPI is not in use: pycomm moves data through shared memory, NCCL and torch.distributed")


def mpi_enabled() -> bool:
    """Return False: pycomm does not use MPI, even where mpirun has started the ranks."""
    return False


def mpi_built() -> bool:
    """Return False: see :func:`mpi_enabled`."""
    return False


def gloo_enabled() -> bool:
    """Return whether Gloo connects the ranks: it does if torch has it."""
    return gloo_built()


def gloo_built() -> bool:
    """Return whether torch has Gloo."""
    return dist.is_available() and dist.is_gloo_available()


def nccl_built() -> int:
    """Return the version of torch's NCCL as a number, 22907 for 2.29.7; 0 without one, or without a GPU."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    nccl: Any = torch.cuda.nccl
    major, minor, patch = map(int, nccl.version()[:3])
    return 10000 * major + 100 * minor + patch


def ddl_built() -> bool:
    """Return False: there is no IBM DDL here."""
    return False


def ccl_built() -> bool:
    """Return False: there is no oneCCL here."""
    return False


def cuda_built() -> bool:
    """Return whether torch has CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch has ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of operations to ``file_path`` on rank 0, for chrome://tracing or Perfetto.

    Args:
        file_path: overwritten.
        mark_cycles: whether to mark every round of agreement.

    Raises:
        ValueError: before ``init()``.
        OSError, ValueError: the file cannot be written, or is none.
    """
    here = world()
    if here.rank == 0:
        here.timeline.start(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Finish the file of :func:`start_timeline`. Raises ValueError before ``init()``."""
    world().timeline.stop()


atexit.register(shutdown)
