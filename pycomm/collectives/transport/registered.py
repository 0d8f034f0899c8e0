"""Memory of GPUs from NCCL's allocator, which NCCL's communicators register: they read and write it where it lies.

NCCL requires that in an operation all ranks pass registered memory, at equal offsets, or none does. So ranks agree on
whether they register (see :class:`NcclTransport`), and every tensor of a size that all ranks share is of one kind.
"""

from __future__ import annotations

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
    """

    def __init__(self, num_bytes: int, device: int) -> None:
        self.num_bytes, self.device = num_bytes, device
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


def empty(dims: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor on a GPU, in memory that NCCL can register if it is large enough."""
    num_bytes = math.prod(dims) * dtype.itemsize
    if num_bytes < _LEAST_BYTES or why_not_registered():
        return torch.empty(dims, dtype=dtype, device=device)
    reclaim()
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        block = RegisteredBlock(num_bytes, index)
    except RuntimeError:
        torch.cuda.empty_cache()  # it may be torch that has the memory, for later tensors
        block = RegisteredBlock(num_bytes, index)
    _blocks[block.address] = block
    storage = torch.as_tensor(block, device=f"cuda:{block.device}").untyped_storage()
    like = torch.empty(dims, device="meta")
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, dims, like.stride())


def register(array: Any, transport: NcclTransport) -> None:
    """Register the block that begins where ``array`` does, if any, with ``transport``, if the ranks register."""
    if not transport.registers or not isinstance(array, torch.Tensor):
        return
    block = _blocks.get(array.data_ptr())
    if block is None:
        return
    if transport.register(block.address, block.num_bytes):
        block.users.append(weakref.ref(transport))
    if is_capturing():
        _in_graphs.add(block)  # for good: nobody says when the last graph is gone


def reclaim() -> None:
    """Free the blocks that have no tensor any more; wait for the GPU if there are any."""
    if not _dead or is_capturing():
        return
    dead = [_dead.pop() for _ in range(len(_dead))]
    for device in {device for _, device, _ in dead}:
        torch.cuda.synchronize(device)  # streams may still use it
    for address, device, users in dead:
        for user in users:
            if (transport := user()) is not None:
                transport.deregister(address)
        _native.nccl_free(address, device, candidate_paths())
