"""Delivery of a sharded step's gradients and new parameters: in memory of one host, or by messages.

HostPartition: between the ranks of one host, in memory that all of them reach.

If each of P ranks averages the gradients of n parameters and steps all of them by Adam, this moves 36 P n bytes: 8 P n
in the all-reduce, 28 P n in the steps. Here each rank reduces its own part of the gradients, reads weights and moments
of that part once, and writes the new weights to all ranks: (8 P + 28) n bytes.

SpreadPartition: between ranks on several hosts, or on GPUs. If P hosts average n gradients and each steps all
parameters, each sends 2 (P - 1) / P n elements before the step. Here each sends (P - 1) / P n before the step, and as
many after it: the new parameters of its part. A step ends when all of them have arrived; on GPUs the host does not
wait, but torch's current stream. Each rank keeps the optimizer state of its own part (ZeRO, Rajbhandari et al., 2020,
section 5.1).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pycomm.agreement import agreed
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.channel import Channel
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.layout import view_like
from pycomm.collectives.transport.base import HostMemory
from pycomm.collectives.transport.gpu import GpuWork
from pycomm.collectives.transport.rendezvous import order_of
from pycomm.errors import CommError, DamageError, attempt
from pycomm.optim.parameters import optimizer_parameters
from pycomm.training.reducer.buckets import SentBucket
from pycomm.training.reducer.partition.comparison import CompareReplicas
from pycomm.training.reducer.partition.sharding import GpuMemory, Memory, Segment, StepPartition, begins_of
from pycomm.training.reducer.settings import Options
from pycomm.worker import Work

_LOG = logging.getLogger("pycomm")


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
        # Each rank begins with a different rank, so that not all write to the same memory at once.
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
        if self.whole is not None:  # kernels write to all ranks' memory directly
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


States = dict[int, dict[str, torch.Tensor]]
"""Whole state of parameters, by their ids, then by key."""


class SpreadSegment(Segment):
    """Segment of ranks that reach each other by messages.

    State is laid out for all ranks, but only this rank's part is ever touched, so only that part takes memory.
    """

    def mirrors_of(self, index: int) -> list[torch.Tensor]:
        return []

    def _zeros(self, num_bytes: int) -> Memory:
        return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def gather(self, channel: Channel) -> None:
        """Overwrite each part of the parameters with its rank's values. Collective."""
        parts = self.parts_in(self.own, self.dtype)
        channel.all_gather_v(parts, parts[self._rank])

    def whole_states(self, sent: SentBucket) -> States:
        """Return all state of the parameters of ``sent``, gathered in new memory. Collective."""
        found: States = {id(slot.param): {} for slot in sent.slots}
        for key, dtype in sorted(self._states, key=str):  # in an order that is the same on all ranks
            whole = torch.empty(self.num_elements, dtype=dtype)
            mine = self.parts_in(self._states[key, dtype], dtype)[self._rank]
            sent.communicator.channel.all_gather_v([whole[share] for share in self.shares], mine)
            for slot, part in zip(sent.slots, torch.split(whole, sent.bucket.numels), strict=True):
                found[id(slot.param)][key] = view_like(part.clone(), slot.param)
        return found


_GPU_ALIGNMENT = 256
"""Alignment of parameters on GPUs in bytes. Matrix products are slow, or kernels fail, where it is less than 16."""


class SpreadPartition(StepPartition):
    """Partition over ranks that reach each other by messages; on GPUs it is by whole parameters."""

    def __init__(
        self,
        communicator: Communicator,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module | None,
        settings: Options,
        compare: CompareReplicas,
        on_gpu: bool = False,
    ) -> None:
        self._optimizer, self._on_gpu = optimizer, on_gpu
        self._segments: dict[SentBucket, SpreadSegment] = {}
        self._is_lost = False
        order = order_of(communicator.channel.transport.hosts)
        super().__init__(communicator, optimizer, module, settings, compare, order, on_gpu)
        self._hook = self._optimizer.register_state_dict_post_hook(self._complete)

    def _adopt(self, buckets: Sequence[SentBucket]) -> None:
        rank = self._communicator.rank
        for sent in buckets:
            bucket, params = sent.bucket, [slot.param for slot in sent.slots]
            shares = self.spans.shares(sent.slots)
            alignment = _GPU_ALIGNMENT // bucket.dtype.itemsize if self._on_gpu else 1
            num_bytes = begins_of(bucket.numels, alignment)[-1] * bucket.dtype.itemsize
            room = self._communicator.empty(num_bytes, torch.uint8, bucket.device)
            own = GpuMemory(room, 0, num_bytes) if room.is_cuda else room.numpy()
            segment = self._segments[sent] = SpreadSegment(bucket, params, shares, rank, own, alignment)
            self._move_in(sent, segment)

    def reduction_failed(self, error: BaseException) -> None:
        # A stream waits for parameters, not the host, which finds out later that they have not arrived.
        if self._on_gpu and isinstance(error, CommError) and not isinstance(error, DamageError):
            self._lost(self._optimizer, error)

    # Steps.

    def _lost(self, optimizer: torch.optim.Optimizer, error: BaseException) -> None:
        if not self._is_lost:
            self._is_lost = True
            super()._lost(optimizer, error)
            torch.optim.Optimizer.zero_grad(optimizer)  # otherwise step() would first say that gradients are used

    def _hand_out(self) -> None:
        works = [self._submit(sent) for sent in self._buckets]
        try:
            for work in works:
                work.wait()
        except BaseException:
            for work in works:
                work.ends_within(None)  # then nothing writes to parameters any more
            raise

    def _submit(self, sent: SentBucket) -> Work | GpuWork:
        """Begin to send the new parameters of ``sent``, and to receive other ranks' parameters."""
        channel, bucket = sent.communicator.channel, sent.bucket

        def gather() -> None:
            # The ranks have agreed on the step.
            with contextlib.nullcontext() if bucket.on_gpu else channel.skip_checks():
                self._segments[sent].gather(channel)

        return channel.submit_on_gpu(bucket.device, gather) if bucket.on_gpu else channel.submit(gather)

    def _is_complete(self) -> bool:
        return False

    # State.

    def _whole_states(self) -> States:
        """Return all state that is kept by parts, gathered in new memory, by parameter. Collective."""
        return {p: s for sent, segment in self._segments.items() for p, s in segment.whole_states(sent).items()}

    def _completed(self, entry: dict[str, Any], param: torch.Tensor, whole: States) -> dict[str, Any]:
        """Return the state ``entry`` of ``param`` with whole tensors in place of parts."""
        if param not in self._places:
            return entry
        segment, index = self._places[param]
        parts = [k for k, v in entry.items() if isinstance(v, torch.Tensor) and segment.is_home(index, k, v)]
        return {**entry, **{key: whole[id(param)][key] for key in parts}}

    def _complete(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Replace parts by whole tensors. Collective."""
        whole, states = self._whole_states(), state_dict["state"]
        for index, param in enumerate(optimizer_parameters(optimizer)):
            if index in states:
                states[index] = self._completed(states[index], param, whole)

    def move_out(self) -> None:
        """Move parameters and whole state to this rank's own memory, and let it step alone. Collective."""
        self._hook.remove()
        try:
            whole = self._whole_states()
            self._stepper.take_whole(lambda entry, param: self._completed(entry, param, whole))
        except (CommError, ValueError) as error:
            _LOG.warning(
                "each rank kept a part of the optimizer's state, and the other ranks' parts are lost (%s): it is "
                "reset; load a checkpoint",
                error,
            )
            self._stepper.take_whole(None)
        super().move_out()
        self._segments.clear()
