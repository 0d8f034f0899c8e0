"""Which transport a process group gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from pycomm import _native
from pycomm.errors import CommError
from pycomm.transport.base import Transport
from pycomm.transport.meeting import Meeting
from pycomm.transport.own_group import cpu_backend_of, own_group, require_own_group, store_of
from pycomm.transport.rendezvous import exchange_memory, introduction, listen
from pycomm.transport.roll_call import RollCall
from pycomm.transport.shared_memory import SharedMemoryTransport
from pycomm.transport.torch_distributed import TorchTransport

TRANSPORTS = ("auto", "shared_memory", "torch")


def choose_transport(
    group: dist.ProcessGroup, wanted: str, timeout: float, problem: Exception | None = None
) -> Transport:
    """``wanted`` of ``TRANSPORTS``; "auto" is shared memory where all ranks are on one host. Collective.

    Args:
        problem: what is wrong with this rank's arguments: raised here once the others know, who get a ValueError.

    Raises:
        ValueError: shared memory is wanted, and there are several hosts; or the group cannot have another
            beside it; or ranks want different things, or run different versions of pycomm.
        CommError: a rank did not come in time, or failed.
        OSError, MemoryError: this machine refused sockets or memory.
    """
    with Meeting(store_of(group), group.rank(), group.size(), timeout) as meeting, listen(meeting.size) as listener:
        if problem is None:
            problem = _look_at(group, wanted)
        greeting = {"wanted": wanted, "version": _native.build_info()["version"], **introduction(listener)}
        if problem is not None:
            greeting["problem"] = str(problem) or type(problem).__name__
        try:
            greetings = meeting.greet(greeting)
        finally:
            if problem is not None:
                raise problem
        _require_alike(greetings)
        same_host = all(other["host"] == greeting["host"] for other in greetings)
        if wanted == "shared_memory" and not same_host:
            raise ValueError("transport is 'shared_memory', but the ranks are not all on one host")
        try:
            if same_host and wanted != "torch":
                peers = exchange_memory(meeting, listener, greetings)
                transport: Transport = _settle(SharedMemoryTransport(group.rank(), peers), timeout)
            else:
                own = own_group(group, f"{group.group_name}/pycomm/{meeting.name}", timeout)
                transport = TorchTransport(own, RollCall(store_of(group), meeting.name, group.rank(), greetings))
        except BaseException as error:
            if isinstance(error, CommError):
                meeting.check(late=True)  # another rank's reason is the better one
            meeting.report(error)
            raise
        meeting.end()
        return transport


def _look_at(group: dist.ProcessGroup, wanted: str) -> Exception | None:
    """What speaks against another group beside ``group``, where one is needed."""
    try:
        if wanted == "torch":
            cpu_backend_of(group)
            require_own_group(group)
    except ValueError as error:
        return error
    return None


def _require_alike(greetings: Sequence[Mapping[str, Any]]) -> None:
    first = greetings[0]
    for p, other in enumerate(greetings):
        if other["version"] != first["version"]:
            raise ValueError(f"rank {p} runs pycomm {other['version']}, rank 0 {first['version']}")
        if other["wanted"] != first["wanted"]:
            raise ValueError(
                f"the ranks disagree: transport is {other['wanted']!r} on rank {p}, {first['wanted']!r} on rank 0"
            )


def _settle(transport: SharedMemoryTransport, timeout: float) -> SharedMemoryTransport:
    """Return once all ranks have mapped all memory."""
    try:
        transport.barrier(timeout)
    except BaseException:
        transport.close("it could not meet the others")
        raise
    return transport
