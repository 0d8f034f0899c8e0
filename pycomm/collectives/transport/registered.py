"""Memory of GPUs from NCCL's allocator, which NCCL's communicators register: they read and write it where it lies.

NCCL requires that in an operation all ranks pass registered memory, at equal offsets, or none does. So ranks agree on
whether they register (see :class:`NcclTransport`), and every tensor of a size that all ranks share is of one kind.

NCCL's symmetric kernels need more: windows, which all ranks make together, and pass together. Gradients cannot lie in
one: when a user keeps a gradient, the bucket gets new memory on that rank alone. Messages can.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

import pycomm._native as _native
from pycomm.collectives.layout import is_capturing
from pycomm.collectives.transport.nccl import NcclTransport, candidate_paths, why_not_registered

_LEAST_BYTES = 1 << 20
"""Bytes from which memory comes from NCCL, which gives 2 MiB at least."""


class RegisteredBlock:
    """Memory from NCCL's allocator. It is freed some time after torch has dropped its last tensor there.

    Attributes:
        users: transports that have registered it.
        symmetric: made to become a window, of one transport.
    """

    def __init__(self, num_bytes: int, device: int, symmetric: bool) -> None:
        self.num_bytes, self.device, self.symmetric = num_bytes, device, symmetric
        self.address = _native.nccl_allocate(num_bytes, device, candidate_paths())
        self.users: list[weakref.ref[NcclTransport]] = []
        weakref.finalize(self, _dead.append, (self.address, device, self.users)).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = {"data": (self.address, False), "shape": (self.num_bytes,), "typestr": "|u1"}
        return {**data, "strides": None, "version": 3}


_blocks: weakref.WeakValueDictionary[int, RegisteredBlock] = weakref.WeakValueDictionary()
_dead: list[tuple[int, int, list[weakref.ref[NcclTransport]]]] = []
_in_graphs: set[RegisteredBlock] = set()


def empty(dims: Sequence[int], dtype: torch.dtype, device: torch.device, symmetric: bool = False) -> torch.Tensor:
    """Return an uninitialized tensor on a GPU, in memory that NCCL can register if it is large enough.

    ``symmetric``: see :meth:`pycomm.Communicator.empty`.
    """
    num_bytes = math.prod(dims) * dtype.itemsize
    if num_bytes < _LEAST_BYTES or why_not_registered():
        return torch.empty(dims, dtype=dtype, device=device)
    reclaim()
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        block = RegisteredBlock(num_bytes, index, symmetric)
    except RuntimeError:
        torch.cuda.empty_cache()  # it may be torch that has the memory, for later tensors
        block = RegisteredBlock(num_bytes, index, symmetric)
    _blocks[block.address] = block
    storage, like = _storage_on(block), torch.empty(dims, device="meta")
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, dims, like.stride())


def _storage_on(block: RegisteredBlock) -> torch.UntypedStorage:
    return torch.as_tensor(block, device=f"cuda:{block.device}").untyped_storage()


def register(array: Any, transport: NcclTransport) -> None:
    """Register the block that is ``array``, if any, with ``transport``, if that registers memory.

    Parts of a block do not count, as each rank may pass another part, and only one rank's part begins the block.
    """
    if not transport.registers or not isinstance(array, torch.Tensor):
        return
    block = _blocks.get(array.data_ptr())
    if block is None or array.nbytes != block.num_bytes:
        return
    if block.symmetric and transport.has_windows:
        if not block.users:
            transport.windows.make(block.address, block.num_bytes)
            block.users.append(weakref.ref(transport))
    elif transport.register(block.address, block.num_bytes):
        block.users.append(weakref.ref(transport))
    if is_capturing():
        _in_graphs.add(block)  # for good: nobody says when the last graph is gone


def reclaim() -> None:
    """Free the blocks that have no tensor any more; wait for the GPU if there are any.

    Windows are freed when all ranks have got here.
    """
    if not _dead or is_capturing():
        return
    dead = [_dead.pop() for _ in range(len(_dead))]
    for device in {device for _, device, _ in dead}:
        torch.cuda.synchronize(device)  # streams may still use it
    for address, device, users in dead:
        free = functools.partial(_native.nccl_free, address, device, candidate_paths())
        may_be_freed = [user.deregister(address, free) for reference in users if (user := reference()) is not None]
        if all(may_be_freed):
            free()
