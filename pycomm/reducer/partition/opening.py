"""Requirements of steps that ranks take together, the memory that they share, and how such steps begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pycomm.agreement import agreed
from pycomm.communicator import Communicator
from pycomm.errors import attempt
from pycomm.layout import require_dense, view_like
from pycomm.optim.fused import FusedStep, KernelStep, rule_of
from pycomm.optim.master_weights import MasterWeights
from pycomm.optim.step_override import HALF
from pycomm.reducer.partition.on_host import HostPartition
from pycomm.reducer.partition.partition import StepPartition, Terms, settings_of
from pycomm.reducer.partition.spread import SpreadPartition
from pycomm.reducer.settings import Settings, Sharding
from pycomm.torch_internals import is_dtensor
from pycomm.transport.base import HostMemory

if TYPE_CHECKING:
    from pycomm.reducer.parameters import ParameterTable


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


def require_shardable(table: ParameterTable, shard: str) -> None:
    """Raise ValueError if kernels do not step the optimizer of ``table``, or its parameters cannot be shared."""
    name, optimizer = f'shard="{shard}"', table.optimizer
    try:
        rule_of(optimizer)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} requires an optimizer that pycomm's kernels step: {error}") from None
    stepper = table.stepper
    if isinstance(stepper, MasterWeights) and not stepper.has_kernels:
        raise ValueError(
            f"{name} requires masters that pycomm's kernels step; {type(optimizer).__name__} steps its own"
        )
    for label, param in table.named():
        if param.device.type != "cpu":
            raise ValueError(f"{name} requires parameters in CPU memory, and {label!r} is on {param.device}")
        if is_dtensor(param):
            raise ValueError(
                f"{name} requires ordinary parameters, and {label!r} is a DTensor, which is sharded already"
            )
        if param.dtype in HALF and not stepper.has_masters:
            raise ValueError(
                f"{name}: parameter {label!r} has dtype {param.dtype}, which kernels step by float32 masters only: "
                "call pycomm.master_weights(optimizer) before attach"
            )
        require_dense(param)


def require_reachable(communicator: Communicator, shard: Sharding) -> None:
    """Raise ValueError if ``shard`` requires all ranks of ``communicator`` to reach one memory, and they do not."""
    if memory_of_all(communicator) is not None:
        return
    if shard.kind == "parameters" or shard.grads == "local":
        raise ValueError(
            f"shard={shard} requires all ranks on one host, where they reach each other's memory; these travel by "
            f'{communicator.transport!r}, over which Sharding("optimizer", grads="part" or "full") works'
        )


def open_partition(
    communicator: Communicator, table: ParameterTable, settings: Settings, shard: Sharding
) -> StepPartition:
    """Return a partition of the parameters that ``table`` is about to sort into buckets. Collective."""
    there = table.stepper
    is_there = isinstance(there, KernelStep)
    terms = Terms(
        communicator,
        there if isinstance(there, KernelStep) else FusedStep(table.optimizer),
        table.module,
        grads=shard.grads,
        average=settings.average,
        most_writes=0 if settings.loss_scaler is None else 1,  # by unscale_()
        was_fused_here=not is_there,
    )
    if memory_of_all(communicator) is None:
        return SpreadPartition(terms)
    return HostPartition(terms, shares_parameters=shard.kind == "parameters")


def settings_lines(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return a line for each parameter group, to be compared between ranks."""
    return settings_of(optimizer).decode().splitlines()
