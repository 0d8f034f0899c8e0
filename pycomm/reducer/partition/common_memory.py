"""Memory of the ranks of a host that all of them write to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pycomm.agreement import agreed
from pycomm.communicator import Communicator
from pycomm.errors import attempt
from pycomm.layout import view_like
from pycomm.transport.base import HostMemory

Memory = Any
"""Object with the buffer protocol."""


def memory_of_all(communicator: Communicator) -> HostMemory | None:
    """Return the memory that all ranks of ``communicator`` reach; ``None`` if there is none."""
    memory = communicator.channel.transport.host_memory
    return memory if memory is not None and memory.num_ranks == communicator.size else None


class CommonMemory:
    """Allocator of memory that all ranks of ``communicator`` reach.

    What a rank has allocated stays allocated until it calls :meth:`release`, however long others use it.
    """

    def __init__(self, communicator: Communicator) -> None:
        memory = memory_of_all(communicator)
        assert memory is not None, "checked before"
        self._communicator, self._memory = communicator, memory
        self._own: list[Memory] = []
        self._num_shared = 0

    def of_each(self, num_bytes: int) -> list[Memory]:
        """Return memory of so many bytes of every rank, in rank order. Collective.

        Raises:
            MemoryError: this rank has too little memory. ValueError on the others.
        """
        return self._open(num_bytes, range(self._communicator.size))

    def of_one(self, num_bytes: int) -> Memory:
        """Return memory of so many bytes that all ranks share, zeros. Collective; errors as above.

        The ranks take turns in providing it.
        """
        owner = self._num_shared % self._communicator.size
        self._num_shared += 1
        memory = self._open(num_bytes, [owner])[0]
        if self._communicator.rank == owner:
            np.frombuffer(memory, np.uint8)[:] = 0
        self._communicator.barrier()
        return memory

    def of_all(self, own: torch.Tensor) -> list[Memory]:
        """Return the memory of all ranks' tensors, ``own`` among them, in rank order. Collective.

        Each lies in memory of its rank that all reach, and takes as many bytes.
        """
        offset = self._memory.offset_of(own.data_ptr(), own.nbytes)
        assert offset >= 0
        return self._exchange(offset, own.nbytes, range(self._communicator.size))

    def release(self) -> None:
        """Let go of what this rank has allocated, once the communicator is closed: nobody gets it again."""
        self._own.clear()

    def _open(self, num_bytes: int, owners: Sequence[int]) -> list[Memory]:
        is_owner, num_bytes = self._communicator.rank in owners, max(num_bytes, 1)
        mine = attempt(lambda: self._allocate(num_bytes) if is_owner else 0)
        offset = agreed(self._communicator.channel.all_gather_bytes, mine, "allocate memory that the ranks share")
        return self._exchange(offset, num_bytes, owners)

    def _exchange(self, offset: int, num_bytes: int, owners: Sequence[int]) -> list[Memory]:
        offsets = [int(text) for text in self._communicator.channel.all_gather_bytes(str(offset).encode())]
        return [self._memory.of_rank(owner, offsets[owner], num_bytes) for owner in owners]

    def _allocate(self, num_bytes: int) -> int:
        block: Memory = self._memory.allocate(num_bytes)
        self._own.append(block)
        return self._memory.offset_of(np.frombuffer(block, np.uint8).ctypes.data, num_bytes)


def tensor_in(memory: Memory, dtype: torch.dtype, begin: int, end: int) -> torch.Tensor:
    """Return elements ``begin`` to ``end`` of ``memory`` as a tensor with a storage of its own, which saves small."""
    if begin == end:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=end - begin, offset=begin * dtype.itemsize)


def tensor_like(param: torch.Tensor, memory: Memory, dtype: torch.dtype, begin: int) -> torch.Tensor:
    """Return elements of ``memory``, from ``begin`` on, in the shape and memory order of ``param``."""
    return view_like(tensor_in(memory, dtype, begin, begin + param.numel()), param)
