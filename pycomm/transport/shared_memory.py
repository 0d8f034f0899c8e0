"""Collectives between the processes of one host. The work is done in csrc/transport/shared_memory.h."""

from __future__ import annotations

import math
from typing import Any

import torch

from pycomm import _native
from pycomm.transport.rendezvous import Peers


class SharedMemoryTransport:
    """Through memory that all ranks have mapped; takes ownership of ``peers``."""

    name = "shared_memory"
    sums_half_exactly = True

    def __init__(self, rank: int, size: int, peers: Peers) -> None:
        self.rank = rank
        self.size = size
        self._group = _native.SharedMemoryGroup(rank, size, peers.memory, peers.sockets, peers.file_bytes)
        # Bound once: these are on the path of every small collective.
        self.all_reduce = self._group.all_reduce
        self.reduce_scatter = self._group.reduce_scatter
        self.all_gather = self._group.all_gather
        self.broadcast = self._group.broadcast
        self.barrier = self._group.barrier
        self.refuse = self._group.refuse

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        block: Any = self._group.allocate(num_bytes)
        return torch.frombuffer(block, dtype=dtype, count=math.prod(shape)).view(shape)

    def close(self) -> None:
        self._group.close("it closed its communicator")
