"""Collectives between the processes of one host. The work is done in csrc/transport/shared_memory/group.h."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch

from pycomm import _native
from pycomm.schedule.program import Program
from pycomm.transport.rendezvous import Peers

_MOST_BYTES = 2**63 - 1


class SharedMemoryTransport:
    """Through memory that all ranks have mapped; takes ownership of ``peers``."""

    name = "shared_memory"
    trusts = False  # comparing costs nothing here, and goes on
    sums_half_exactly = True
    interruptible = True

    def __init__(self, rank: int, peers: Peers) -> None:
        self.rank = rank
        self.size = len(peers.memory)
        self._group = _native.SharedMemoryGroup(rank, peers.memory, peers.sockets, peers.file_bytes)
        self._programs: WeakKeyDictionary[Program, _native.Program] = WeakKeyDictionary()
        # Bound once: these are on the path of every small collective.
        self.all_reduce = self._group.all_reduce
        self.reduce_scatter = self._group.reduce_scatter
        self.all_gather = self._group.all_gather
        self.all_to_all = self._group.all_to_all
        self.broadcast = self._group.broadcast
        self.barrier = self._group.barrier
        self.refuse = self._group.refuse

    def run(self, program: Program, x: Any, op: str, timeout: float) -> None:
        if program not in self._programs:
            name = program.name.encode("ascii", "replace").decode()  # for errors; not all text is UTF-8
            words = (program.words(), program.rank, program.num_ranks, name, program.digest)
            self._programs[program] = _native.Program(*words)
        self._group.run(self._programs[program], x, op, timeout)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if num_bytes > _MOST_BYTES:
            raise MemoryError(f"shared memory: {num_bytes} bytes needed, more than can be addressed")
        block: Any = self._group.allocate(num_bytes)
        return torch.frombuffer(block, dtype=dtype, count=math.prod(shape)).view(shape)

    def close(self, reason: str) -> None:
        self._group.close(reason)
