"""Collectives between the processes of one host. The work is done in csrc/transport/shared_memory/group.h."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch

import pycomm._native as _native
from pycomm.collectives.recorder import Recorder
from pycomm.collectives.transport.base import (
    AllReduceApart,
    HostMemory,
    OwnShare,
    ReduceScatterApart,
    buffer_limit,
)
from pycomm.collectives.transport.rendezvous import Peers

if TYPE_CHECKING:
    from pycomm.schedule.program import Program

_MOST_BYTES = 2**63 - 1


class SharedMemoryTransport:
    """Transport through memory that all ranks have mapped. It takes ownership of ``peers``.

    ``names`` are the numbers by which errors name the ranks, if these are a part of another group.
    """

    name = "shared_memory"
    skip_checks: bool | Literal["after the next"] = False  # ignored, as comparing costs nothing here
    interruptible = True
    recorder: Recorder

    def __init__(self, rank: int, peers: Peers, names: Sequence[int] = ()) -> None:
        self.rank = rank
        self.size = len(peers.memory)
        self._group = _native.SharedMemoryGroup(rank, peers.memory, peers.sockets, peers.file_bytes, names)
        self._group.buffer_limit = buffer_limit()
        # Bound once: these are on the path of every small collective.
        self.all_reduce = self._group.all_reduce
        self.own_share: OwnShare | None = self._group.own_share
        self.all_reduce_apart: AllReduceApart | None = self._group.all_reduce_apart
        self.reduce_scatter = self._group.reduce_scatter
        self.all_gather = self._group.all_gather
        self.all_to_all = self._group.all_to_all
        self.reduce = self._group.reduce
        self.all_to_all_v = self._group.all_to_all_v
        self.reduce_scatter_v = self._group.reduce_scatter_v
        self.reduce_scatter_apart: ReduceScatterApart | None = self._group.reduce_scatter_apart
        self.broadcast = self._group.broadcast
        self.barrier = self._group.barrier
        self.send = self._group.send
        self.receive = self._group.post_receive
        self.refuse = self._group.refuse
        self.hosts: Sequence[Sequence[int]] = (tuple(range(self.size)),)
        self.give_up_stopped_after = self._group.give_up_stopped_after
        self._compiled: WeakKeyDictionary[Program, _native.Program] = WeakKeyDictionary()
        group = self._group
        self.host_memory: HostMemory | None = HostMemory(group.allocate, group.offset_of, group.memory_of, self.size)

    @property
    def buffer_limit(self) -> int:
        return self._group.buffer_limit

    @buffer_limit.setter
    def buffer_limit(self, num_bytes: int) -> None:
        self._group.buffer_limit = num_bytes

    @property
    def buffered_bytes(self) -> int:
        """Number of bytes that messages occupy which were sent and not yet received."""
        return self._group.buffered_bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if num_bytes > _MOST_BYTES:
            raise MemoryError(f"shared memory: {num_bytes} bytes needed, more than can be addressed")
        block: Any = self._group.allocate(num_bytes)
        return torch.frombuffer(block, dtype=dtype, count=math.prod(shape)).view(shape)

    def all_gather_v(self, outs: Sequence[Any], x: Any, timeout: float) -> None:
        self._group.all_to_all_v(outs, [x] * self.size, timeout)

    def run_program(self, program: Program, x: Any, op: str, timeout: float) -> None:
        if program not in self._compiled:
            name = program.name.encode("ascii", "replace").decode()  # for errors; not all text is UTF-8
            words = (program.words(), program.rank, program.num_ranks, name, program.digest)
            self._compiled[program] = _native.Program(*words)
        self._group.run(self._compiled[program], x, op, timeout)

    def hand_over(self, patience: float) -> None:
        pass  # messages lie in memory that their receivers have mapped, too

    def close(self, reason: str) -> None:
        self._group.close(reason)
