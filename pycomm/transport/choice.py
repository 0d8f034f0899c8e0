"""Which transport a process group gets."""

from __future__ import annotations

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from pycomm.transport.base import Transport
from pycomm.transport.rendezvous import Meeting, meet
from pycomm.transport.shared_memory import SharedMemoryTransport
from pycomm.transport.torch_distributed import TorchTransport

TRANSPORTS = ("auto", "shared_memory", "torch")


def choose_transport(group: dist.ProcessGroup, wanted: str, timeout: float) -> Transport:
    """``wanted`` of ``TRANSPORTS``; "auto" is shared memory where all ranks are on one host. Collective.

    Raises:
        ValueError: shared memory is wanted, and there are several hosts.
    """
    if wanted == "torch":
        return TorchTransport(group)
    meeting = Meeting.begin(_store_of(group), group.rank(), group.size(), timeout)
    peers = meet(meeting)
    if peers is None:
        if wanted == "shared_memory":
            raise ValueError("transport is 'shared_memory', but the ranks are not all on one host")
        return TorchTransport(group)
    transport = SharedMemoryTransport(group.rank(), group.size(), peers)
    transport.barrier(timeout)  # everybody has read what is forgotten now
    meeting.forget("hello", "token")
    return transport


def _store_of(group: dist.ProcessGroup) -> Store:
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return distributed_c10d._get_process_group_store(group)  # torch < 2.7 has no public way
