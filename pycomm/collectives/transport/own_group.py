"""Process group of the user: the place where the ranks of a communicator meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from pycomm.checks import LONGEST_TIMEOUT, seconds_of
from pycomm.torch_internals import (
    Store,
    has_default_group_only,
    has_joined_gloo,
    store_of,
    timeout_of,
)

PYCOMM = "pycomm"
"""Name of pycomm's own backend of torch.distributed, which itself uses Gloo between hosts."""

OWN = "/pycomm/"
"""Part of the names of groups that are pycomm's own."""


@dataclass(frozen=True)
class Place:
    """Place where the ranks of a process group meet.

    Attributes:
        name: name of the group.
        store: its store.
        rank: rank of this process in it.
        ranks: global ranks of its members, in the group's order.
        backends: its backends by device, as torch writes them: "cpu:gloo,cuda:nccl".
        lost: returns the fate of a rank that will not arrive, ``None`` for others.
        patience: seconds of a meeting, if less than the timeout of operations: between hosts nothing reveals that a
            rank died before it arrived.
    """

    name: str
    store: Store
    rank: int
    ranks: Sequence[int]
    backends: str
    lost: Callable[[int], str | None] | None = None
    patience: float = math.inf

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def stranger(self, rank: int) -> str | None:
        """Return why ``rank`` will never arrive: it makes this group over Gloo; ``None`` if that is unknown.

        Gloo's addresses in the store reveal it, unless this rank has one, too: then an earlier group left them.
        """
        is_ours = f"cpu:{PYCOMM}" in self.backends.split(",")
        if is_ours and has_joined_gloo(self.store, rank) and not has_joined_gloo(self.store, self.rank):
            return (
                f"the ranks disagree: the backend of the process group is 'gloo' on rank {rank}, "
                f"{PYCOMM!r} on rank {self.rank}"
            )
        return None


def place_of(group: dist.ProcessGroup) -> Place:
    """Return the place where the ranks of ``group`` have met."""
    ranks = dist.get_process_group_ranks(group)
    return Place(group.group_name, store_of(group), group.rank(), ranks, str(dist.get_backend_config(group)))


def group_of(given: dist.ProcessGroup | DeviceMesh | None, name: str = "group") -> dist.ProcessGroup:
    """Return the process group that the user's argument ``name`` stands for; the default group for ``None``."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"{name} is a DeviceMesh of {given.ndim} dimensions {given.mesh_dim_names}, "
                'wanted one, such as mesh["dp"]'
            )
        given = given.get_group()
    group: object = given if given is not None else dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{name} is a group that this rank is not a member of")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{name} is a {type(group).__name__}, wanted a process group")
    return group


def found_group(find: Callable[[], dist.ProcessGroup]) -> tuple[dist.ProcessGroup, Exception | None]:
    """Return the group of ``find``; if that raises, the default group, whose ranks learn of the error, and the error.

    If there are several groups, so that it is unknown which of them the other ranks passed, the error is raised.
    """
    try:
        return find(), None
    except Exception as error:
        world = dist.group.WORLD
        if world is None or not has_default_group_only(but=OWN):
            raise
        return world, error


def timeout_seconds(
    timeout: timedelta | float | None, process_group: dist.ProcessGroup | DeviceMesh | None = None
) -> float:
    """Return the user's ``timeout`` in seconds; for ``None`` the timeout of ``process_group``.

    Without a group (a process that joins others): torch's default, half an hour.
    """
    if timeout is not None:
        return seconds_of(timeout)
    has_groups = dist.is_available() and dist.is_initialized()
    found = timeout_of(group_of(process_group, "process_group")) if has_groups else default_pg_timeout
    return min(found.total_seconds(), LONGEST_TIMEOUT)
