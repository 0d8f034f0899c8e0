"""Process groups, backends and stores."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

# Newer releases of torch renamed them, and warn about the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def keeps_python_works() -> bool:
    """Return whether C++ that waits for a ``Work`` made in Python keeps the Python object.

    torch 2.4 does not: the methods are gone with the object, and DistributedDataParallel waits forever. Releases
    between it and 2.13 were not tried.
    """
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the store of ``group``, a part of the one in which its ranks met."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return distributed_c10d._get_process_group_store(group)  # torch < 2.7 has no public function


def root_store(store: Store) -> Store:
    """Return the store that ``store`` is a part of, without any prefix."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what operates on tensors of ``device`` in ``group``; ``None`` if nothing does."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return None


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of ``group`` (``init_process_group(timeout=...)``), or torch's default if unknown.

    Backends may have timeouts of their own: the CPU backend's counts, else the GPU backend's.
    """
    for device in ("cpu", "cuda"):
        backend = backend_of(group, torch.device(device))
        backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        try:
            found = getattr(backend.options, "_timeout", None)
        except (AttributeError, RuntimeError):  # Python's have no options, and some of C++ say "not implemented"
            found = getattr(backend, "default_timeout", None)  # of pycomm's own
        if isinstance(found, timedelta) and found > timedelta(0):
            return found
    return default_pg_timeout


def make_process_group(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    backend: str,
    name: str,
    timeout: float,
    patience: float,
) -> dist.ProcessGroup:
    """Make a group called ``name`` of the global ``ranks``, which meet in ``store``. Collective among them.

    ``timeout`` limits its operations, ``patience`` the meeting.

    ``torch.distributed.new_group(..., use_local_synchronization=True)`` is the public function for a group
    that only its members create. It derives the name from the number of groups that the process has: a
    group made after another was destroyed finds the old one's addresses in the store, and members with
    different numbers of groups do not meet. Hence the function beneath it, with a name of our own.
    """
    make: Any = distributed_c10d._new_process_group_helper
    made: dist.ProcessGroup = make(
        len(ranks),
        rank,
        list(ranks) if dist.is_initialized() else [],  # while the default group itself is being made
        dist.Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        timeout=timedelta(seconds=patience),
    )[0]
    if patience != timeout:
        made._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout))
    return made


def has_joined_gloo(store: Store, rank: int) -> bool:
    """Return whether ``rank`` has begun to join a Gloo group in ``store``, which has its address then."""
    joined: bool = store.check([f"0/{rank}"])
    return joined


def open_monitored_barrier(backend: str) -> None:
    """Let ``torch.distributed.monitored_barrier`` take groups on ``backend``.

    Before 2.14 it refuses all but Gloo's, and since then those under which no device's backend is registered.

    A group on another backend gets what torch's own function does.
    """
    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        found: Any = dist.group.WORLD if group is None else group
        if found not in distributed_c10d._world.pg_map or dist.get_backend(found) != backend:
            original(group, timeout, wait_all_ranks)
        else:  # which takes seconds for a timeout, too, as torch's own does
            found.monitored_barrier(timeout, wait_all_ranks)

    for module in (distributed_c10d, dist):
        vars(module)["monitored_barrier"] = monitored_barrier


def number_process_group(made: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Tell torch the global ranks of the members of ``made``."""
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}


def has_default_group_only(but: str) -> bool:
    """Return whether this process is only in the default group, and in groups with ``but`` in their names."""
    names = distributed_c10d._world.pg_names
    return sum(but not in names.get(group, "") for group in distributed_c10d._world.pg_map) == 1


def owns_process_group(group: dist.ProcessGroup) -> bool:
    """Return whether torch still has ``group``: ``destroy_process_group()`` destroys all groups.

    An uninitialized process may have groups, too: newcomers make theirs without a default group.
    """
    return group in distributed_c10d._world.pg_map
