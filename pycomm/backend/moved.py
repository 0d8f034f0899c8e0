"""Storages of tensors that are reduced again and again, moved to memory that all ranks of the host reach.

DistributedDataParallel allocates its buckets itself, and leaves no way to give it others. But torch can
exchange the memory under a storage, and so under all tensors that are views of it: ``share_memory_()``
puts it in a mapping of its own. Pages of this rank's arena are then mapped over that mapping. From there on
the arena's block and the user's tensors are the same memory under two addresses, and an all-reduce of the
block is one of the bucket. The file that ``share_memory_()`` made is closed at once, so what it needs of
/dev/shm it needs for a moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.torch_internals import StorageWatch, current_graph_task, move_to_shared_mapping, storage_uses
from pycomm.transport.base import Transport

log = logging.getLogger("pycomm")

_LEAST_BYTES = 64 << 10  # of a storage worth moving: what is smaller travels with its announcement
_VIEWS_OF_A_BUCKET = 3  # owners of a storage, beside the tensor in hand, that make it a bucket and not one gradient
_SLACK = 8 << 20  # bytes to leave in /dev/shm
_SHM = "/dev/shm"


@dataclass
class _Seen:
    """Storage that has been seen: how to tell that it still lives and where it was."""

    watch: StorageWatch
    address: int
    block: torch.Tensor | None = None
    """Its bytes in the arena, once it has been moved."""

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        return self.address == storage.data_ptr() and not self.watch.is_over()


class MovedStorages:
    """Keeper of the storages of one group that have been moved.

    Args:
        transport: the group's.
        ranks_here: number of its ranks on this host, which move theirs at the same time.

    Attributes:
        num_moved: number of storages moved so far.
    """

    def __init__(self, transport: Transport, ranks_here: int) -> None:
        self._allocate: Callable[[int], Any] | None = getattr(transport, "block", None)
        self._ranks_here = ranks_here
        self._seen: dict[int, _Seen] = {}
        self._told = False
        self.num_moved = 0

    def reachable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or its alias in the arena if its storage was moved; move a storage that will come again.

        A storage is moved when it is first seen if it is a bucket (during a backward pass, with many
        tensors in it), else when it is seen for the second time. Nobody else may use it meanwhile.

        Args:
            tensor: contiguous, in CPU memory.
        """
        if tensor.nbytes <= _LEAST_BYTES or self._allocate is None:
            return tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        seen = self._seen.get(key)
        if seen is None or not seen.is_of(storage):
            self._forget_dead()
            seen = self._seen[key] = _Seen(StorageWatch(storage), storage.data_ptr())
            if not self._is_bucket(tensor):
                return tensor
        if seen.block is None and not self._move(storage, seen):
            return tensor
        assert seen.block is not None
        begin = tensor.storage_offset() * tensor.itemsize
        return seen.block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    @staticmethod
    def _is_bucket(tensor: torch.Tensor) -> bool:
        return current_graph_task() >= 0 and storage_uses(tensor) > _VIEWS_OF_A_BUCKET

    def _forget_dead(self) -> None:
        for key in [key for key, seen in self._seen.items() if seen.watch.is_over()]:
            del self._seen[key]

    def _move(self, storage: torch.UntypedStorage, seen: _Seen) -> bool:
        """Move ``storage`` to the arena; return false, having said why once, if it stays where it is."""
        if storage.is_shared():  # by the user, whose processes have it mapped
            return False
        num_bytes = storage.nbytes()
        try:
            self._require_room(num_bytes)
            assert self._allocate is not None
            block = self._allocate(num_bytes)
            contents = torch.frombuffer(block, dtype=torch.uint8, count=num_bytes)
            contents.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
            with move_to_shared_mapping(storage) as address:
                block.map_over(address)
        except (OSError, RuntimeError, MemoryError) as error:
            self._tell(error)
            return False
        seen.block, seen.address = contents, storage.data_ptr()
        self.num_moved += 1
        return True

    def _require_room(self, num_bytes: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            state = os.statvfs(_SHM)
            room, wanted = state.f_bavail * state.f_frsize, num_bytes * self._ranks_here + _SLACK
            if room >= wanted:
                return
            raise OSError(f"{_SHM} has {room >> 20} MiB left, {wanted >> 20} MiB wanted for a moment")
        raise OSError(f"there is no {_SHM}")

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            log.warning("buckets stay in private memory and are copied at each all-reduce: %s", error)
