"""Collectives between the processes of one host. The work is done in csrc/transport/shared_memory/group.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

import pycomm._native as _native
from pycomm.collectives.transport.base import AllReduceApart, HostMemory, OwnShare, ReduceScatterApart
from pycomm.collectives.transport.native import NativeTransport
from pycomm.collectives.transport.rendezvous import Peers

_MOST_BYTES = 2**63 - 1


class SharedMemoryTransport(NativeTransport):
    """Transport through memory that all ranks have mapped. It takes ownership of ``peers``.

    ``names`` are the numbers by which errors name the ranks, if these are a part of another group.
    """

    name = "shared_memory"
    skip_checks: bool | Literal["after the next"] = False  # ignored, as comparing costs next to nothing here

    def __init__(self, rank: int, peers: Peers, names: Sequence[int] = ()) -> None:
        size = len(peers.memory)
        group = _native.SharedMemoryGroup(rank, peers.memory, peers.sockets, peers.file_bytes, names)
        super().__init__(group, rank, size)
        self.group = group
        self.own_share: OwnShare | None = group.own_share
        self.all_reduce_apart: AllReduceApart | None = group.all_reduce_apart
        self.reduce_scatter_apart: ReduceScatterApart | None = group.reduce_scatter_apart
        self.give_up_stopped_after = group.give_up_stopped_after
        self.hosts: Sequence[Sequence[int]] = (tuple(range(size)),)
        self.host_memory: HostMemory | None = HostMemory(group.allocate, group.offset_of, group.memory_of, size)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if num_bytes > _MOST_BYTES:
            raise MemoryError(f"shared memory: {num_bytes} bytes needed, more than can be addressed")
        block: Any = self.group.allocate(num_bytes)
        return torch.frombuffer(block, dtype=dtype, count=math.prod(shape)).view(shape)

    def hand_over(self, patience: float) -> None:
        pass  # messages lie in memory that their receivers have mapped, too
