"""Buckets of DistributedDataParallel, moved to memory that all ranks of the host reach.

DistributedDataParallel allocates its buckets itself, and accepts no others. But torch can replace the memory of a
storage, and so of all its views: ``share_memory_()`` puts it in a mapping of its own. Pages of this rank's arena are
then mapped over that mapping. From then on the arena's block and the user's tensors are the same memory under two
addresses, and an all-reduce of the block reduces the bucket. The file of ``share_memory_()`` is closed at once, so
/dev/shm is needed only briefly.

Only buckets are moved: torch crashes when it resizes a storage moved in this way, but buckets are never resized.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.collectives.transport.base import HostMemory
from pycomm.torch_internals import StorageWatch, move_to_shared_mapping, storage_identity, storage_uses

log = logging.getLogger("pycomm")

_LEAST_BYTES = 64 << 10  # of a storage worth moving: what is smaller travels with its announcement
_VIEWS_OF_A_BUCKET = 3  # owners of a storage, beside the tensor in hand, that make it a bucket and not one gradient
_SLACK = 8 << 20  # bytes to leave in /dev/shm
_SHM = "/dev/shm"


@dataclass
class _Moved:
    """Storage that has been moved.

    Attributes:
        watch: tells whether it still lives.
        address: where it was put.
        contents: its bytes, in the arena.
    """

    watch: StorageWatch
    address: int
    contents: torch.Tensor

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Return whether ``storage`` still lies where it was moved."""
        return self.address == storage.data_ptr() and not self.watch.is_over()


class MovedStorages:
    """Keeper of the storages of one group that have been moved.

    Args:
        memory: memory that the group's ranks on this host reach, if there is any.

    Attributes:
        num_moved: number of storages moved so far.
    """

    def __init__(self, memory: HostMemory | None) -> None:
        self._memory = memory
        self._moved: dict[int, _Moved] = {}
        self._has_logged = False
        self.num_moved = 0

    def reachable(self, tensor: torch.Tensor, in_backward: bool) -> torch.Tensor:
        """Return the alias of ``tensor`` in the arena if it is in a bucket, moved at first use; else ``tensor``.

        A bucket is a storage with many tensors that a backward pass reduces. Nobody else may use it meanwhile.

        Args:
            tensor: contiguous, in CPU memory.
            in_backward: whether a backward pass has asked for the operation.
        """
        if self._memory is None or tensor.nbytes <= _LEAST_BYTES:
            return tensor
        storage = tensor.untyped_storage()
        moved = self._moved.get(storage_identity(storage))
        if moved is None or not moved.is_of(storage):
            if not in_backward or storage_uses(tensor) <= _VIEWS_OF_A_BUCKET:
                return tensor
            for key in [key for key, known in self._moved.items() if known.watch.is_over()]:
                del self._moved[key]
            moved = self._move(storage, self._memory)
            if moved is None:
                return tensor
        begin = tensor.storage_offset() * tensor.itemsize
        return moved.contents[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _move(self, storage: torch.UntypedStorage, memory: HostMemory) -> _Moved | None:
        """Move ``storage`` to the arena; if that fails, log why once, and return ``None``."""
        if storage.is_shared():  # by the user, whose processes have it mapped
            return None
        num_bytes = storage.nbytes()
        try:
            _require_room(num_bytes * memory.num_ranks + _SLACK)  # all of them move theirs now
            block: Any = memory.allocate(num_bytes)
            contents = torch.frombuffer(block, dtype=torch.uint8, count=num_bytes)
            contents.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            with move_to_shared_mapping(storage) as address:
                block.map_over(address)
        except (OSError, RuntimeError, MemoryError) as error:
            if not self._has_logged:
                self._has_logged = True
                log.warning("buckets stay in private memory and are copied at each all-reduce: %s", error)
            return None
        moved = self._moved[storage_identity(storage)] = _Moved(StorageWatch(storage), storage.data_ptr(), contents)
        self.num_moved += 1
        return moved


def _require_room(wanted: int) -> None:
    state = os.statvfs(_SHM)
    room = state.f_bavail * state.f_frsize
    if room < wanted:
        raise OSError(f"{_SHM} has {room >> 20} MiB left, {wanted >> 20} MiB needed for a moment")
