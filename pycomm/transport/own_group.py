"""The process group that the user has, and one of a communicator's own beside it.

Operations of one group must be called in one order on all ranks. A communicator works on a thread of
its own, so on the user's group its operations would mix with the user's, and with those of other
communicators: a hang or, over Gloo, the end of the process.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.errors import CommError
from pycomm.torch_internals import make_process_group, number_process_group, owns_process_group


def group_of(process_group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The group that a user means: the default one for ``None``; ValueError for what is none."""
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {process_group.ndim} dimensions {process_group.mesh_dim_names}, "
                'wanted one: mesh["dp"], say'
            )
        process_group = process_group.get_group()
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError("process_group is a group that this rank is not a member of")
    return group


def cpu_backend_of(group: dist.ProcessGroup) -> str:
    """The name of the backend that moves ``group``'s CPU tensors.

    Raises:
        ValueError: it has none.
    """
    backends = str(dist.get_backend_config(group))  # such as "cpu:gloo,cuda:nccl"
    names = dict(part.split(":", 1) for part in backends.split(",") if ":" in part)
    if "cpu" not in names:
        raise ValueError(
            f"process_group has no backend for CPU tensors, only {backends}: call "
            'init_process_group("cpu:gloo,cuda:nccl"), since the ranks first agree over the CPU on what they do'
        )
    return names["cpu"]


def require_own_group(group: dist.ProcessGroup) -> None:
    """ValueError if the backend has no groups that only some of all ranks make, and ``group`` is one."""
    if cpu_backend_of(group) == dist.Backend.MPI and group.size() < dist.get_world_size():
        raise ValueError(
            "process_group is a sub-group over MPI, whose groups only all ranks together can make: pass a group of "
            "all ranks, or one over Gloo"
        )


def own_group(group: dist.ProcessGroup, name: str, timeout: float) -> dist.ProcessGroup:
    """A group of ``group``'s ranks, in their order, for CPU tensors and by the same backend. Collective among them.

    Args:
        name: unique among all groups that these ranks ever have.
        timeout: in seconds, of its creation and of every operation.

    Raises:
        ValueError: the backend has no groups that only some of all ranks make.
        CommError: a rank did not come in time, or could not be reached.
    """
    backend = cpu_backend_of(group)
    require_own_group(group)
    ranks = dist.get_process_group_ranks(group)
    try:
        made = make_process_group(group, backend, name, timeout)
    except RuntimeError as error:
        what = f"a process group of pycomm's own could not be made: {error}"
        raise CommError.during("rendezvous", what, rank=group.rank(), elapsed=timeout) from error
    number_process_group(made, ranks)
    return made


def destroy_group(group: dist.ProcessGroup) -> None:
    """Give ``group`` back, unless all groups went with ``destroy_process_group()``."""
    if owns_process_group(group):
        dist.destroy_process_group(group)
