"""Collectives between processes of several hosts. The work is done in csrc/transport/tcp/group.h."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Literal

import pycomm._native as _native
from pycomm.collectives.transport.base import AllReduceApart, HostMemory, OwnShare, ReduceScatterApart
from pycomm.collectives.transport.connections import Connections
from pycomm.collectives.transport.host_tensors import private_tensor
from pycomm.collectives.transport.native import NativeTransport

DEAD_AFTER = "PYCOMM_DEAD_AFTER"
_DEAD_AFTER = 10.0  # seconds


def dead_after() -> float:
    """Return the seconds without an acknowledgment after which a host counts as gone: the variable's value, or 10.

    Raises:
        ValueError: the variable is no number of seconds.
    """
    text = os.environ.get(DEAD_AFTER, "")
    if not text:
        return _DEAD_AFTER
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 1e6:
        raise ValueError(f"the environment variable {DEAD_AFTER} is {text!r}, wanted a number of seconds from 1 on")
    return seconds


class TcpTransport(NativeTransport):
    """Transport over TCP. It takes ownership of ``connections``, for data and for control, of the meeting ``name``."""

    name = "tcp"
    skip_checks: bool | Literal["after the next"] = False  # ignored, as frames are compared in any case
    own_share: OwnShare | None = None
    all_reduce_apart: AllReduceApart | None = None
    reduce_scatter_apart: ReduceScatterApart | None = None
    host_memory: HostMemory | None = None

    def __init__(self, rank: int, name: str, connections: Connections) -> None:
        *data, control = connections.sockets
        size = len(control)
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        self.group = _native.TcpGroup(rank, number, data, control, connections.addresses, dead_after())
        super().__init__(self.group, rank, size)
        self.hosts: Sequence[Sequence[int]] = [(p,) for p in range(size)]
        self.hand_over, self.empty = self.group.hand_over, private_tensor

    def give_up_stopped_after(self, seconds: float) -> None:
        """Do nothing: whether a process is stopped is known on its own host only."""
