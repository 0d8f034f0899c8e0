"""Which transport a process group gets."""

from __future__ import annotations

import torch.distributed as dist

from pycomm.transport.base import Transport
from pycomm.transport.own_group import cpu_backend_of, own_group, store_of
from pycomm.transport.rendezvous import Meeting, meet
from pycomm.transport.shared_memory import SharedMemoryTransport
from pycomm.transport.torch_distributed import TorchTransport

TRANSPORTS = ("auto", "shared_memory", "torch")


def choose_transport(group: dist.ProcessGroup, wanted: str, timeout: float) -> Transport:
    """``wanted`` of ``TRANSPORTS``; "auto" is shared memory where all ranks are on one host. Collective.

    Raises:
        ValueError: shared memory is wanted, and there are several hosts; or the group cannot have another beside it.
    """
    if wanted == "torch":
        cpu_backend_of(group)  # or an error, before anything is asked of the store
    meeting = Meeting.begin(store_of(group), group.rank(), group.size(), timeout)
    peers = None
    if wanted == "torch":
        meeting.wait_for_all()  # a backend that waits for ranks may not be interrupted
    else:
        peers = meet(meeting)
    if peers is None:
        if wanted == "shared_memory":
            raise ValueError("transport is 'shared_memory', but the ranks are not all on one host")
        return TorchTransport(own_group(group, f"{group.group_name}/{meeting.name}", timeout))
    transport = SharedMemoryTransport(group.rank(), group.size(), peers)
    try:
        transport.barrier(timeout)  # everybody has read what is forgotten now
    except BaseException:
        transport.close("it could not meet the others")
        raise
    meeting.forget("hello", "token")
    return transport
