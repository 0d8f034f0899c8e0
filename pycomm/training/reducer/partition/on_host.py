"""HostPartition: a sharded step between the ranks of one host, in memory that all of them reach.

If each of P ranks averages the gradients of n parameters and steps all of them by Adam, this moves 36 P n bytes: 8 P n
in the all-reduce, 28 P n in the steps. Here each rank reduces its own part of the gradients, reads weights and moments
of that part once, and writes the new weights to all ranks: (8 P + 28) n bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pycomm.agreement import agreed
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport.base import HostMemory
from pycomm.errors import attempt
from pycomm.training.reducer.buckets import SentBucket
from pycomm.training.reducer.partition.comparison import CompareReplicas
from pycomm.training.reducer.partition.partition import Memory, Segment, StepPartition
from pycomm.training.reducer.settings import Options


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


class HostSegment(Segment):
    """Segment in memory that all ranks reach."""

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[torch.Tensor],
        shares: Sequence[slice],
        rank: int,
        memory: CommonMemory,
    ) -> None:
        self._memory, size = memory, len(shares)
        everyone = memory.of_each(bucket.num_elements * bucket.dtype.itemsize)
        # Each rank begins with another one, so that they do not all write to the same memory at once.
        self._others = [everyone[(rank + i) % size] for i in range(1, size)]
        super().__init__(bucket, params, shares, rank, everyone[rank])

    def mirrors_of(self, index: int) -> list[torch.Tensor]:
        return [self.part_in(memory, index) for memory in self._others]

    def _zeros(self, num_bytes: int) -> Memory:
        return self._memory.of_one(num_bytes)


class HostPartition(StepPartition):
    """Partition over ranks that all reach one memory."""

    is_shared = True

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module | None,
        settings: Options,
        compare: CompareReplicas,
    ) -> None:
        self._memory = CommonMemory(communicator)
        # Number of steps of which each rank has completed its own part.
        self._num_taken = np.frombuffer(self._memory.of_one(8 * communicator.size), np.int64)
        super().__init__(communicator, optimizer, module, settings, compare, range(communicator.size))

    def _adopt(self, buckets: Sequence[SentBucket]) -> None:
        rank = self._communicator.rank
        for sent in buckets:
            params = [slot.param for slot in sent.slots]
            shares = self.spans.shares(sent.slots)
            segment = HostSegment(sent.bucket, params, shares, rank, self._memory)
            self._move_in(sent, segment)

    def release(self) -> None:
        self._memory.release()

    # Steps.

    def _hand_out(self) -> None:
        if self.whole is not None:  # kernels write to all ranks' memory by themselves
            for param in self._places:
                for mirror in self.mirrors_of(param):
                    mirror.copy_(self.span_of(param).of(param))
        self._num_taken[self._communicator.rank] = self._num_steps
        self._communicator.barrier()

    def _is_complete(self) -> bool:
        return bool((self._num_taken >= self._num_steps).all())

    def _lost(self, optimizer: torch.optim.Optimizer, error: BaseException) -> None:
        super()._lost(optimizer, error)
        # Ranks that have not noticed the loss still write to shared memory, where no checkpoint may be loaded.
        for param in self._places:
            param.data = param.detach().clone(memory_format=torch.preserve_format)
