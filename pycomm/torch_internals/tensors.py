"""Tensors and their storages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef as _StorageWeakRef


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of ``tensor``, which every in-place write increments."""
    return tensor._version


def versions_of(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Return the version counters of ``tensors``; 0 for ``None``."""
    return [0 if tensor is None else tensor._version for tensor in tensors]


_NOTES_MANY = "Iterable" in str(increment_version.__annotations__.get("tensor"))  # torch 2.4 takes one tensor only


def note_writes(tensors: list[torch.Tensor]) -> None:
    """Tell autograd that ``tensors`` were written to, by incrementing their version counters."""
    if _NOTES_MANY:
        increment_version(tensors)
        return
    for tensor in tensors:
        increment_version(tensor)


def uses_outside_python(tensor: torch.Tensor) -> int:
    """Return the number of C++ owners of ``tensor``; a tensor that only Python refers to has one."""
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    return uses


def storage_uses(tensor: torch.Tensor) -> int:
    """Return the number of tensors and other owners that share the storage of ``tensor``."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


def storage_identity(storage: torch.UntypedStorage) -> int:
    """Return a number that only ``storage`` has, among those that live or are watched by a :class:`StorageWatch`."""
    return int(storage._cdata)


class StorageWatch:
    """Watch over a storage that does not keep it alive; as long as it exists, no other storage has its identity."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = _StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_over(self) -> bool:
        return bool(self._reference.expired())


@contextlib.contextmanager
def move_to_shared_mapping(storage: torch.UntypedStorage) -> Iterator[int]:
    """Move ``storage``, in CPU memory, to a mapping of its own, without its tensors noticing; yield its address.

    The block may map other pages there. Afterwards the file behind torch's mapping is gone: torch would
    hand it to other processes, as the memory of these tensors, which it no longer is.

    Raises:
        RuntimeError, OSError: there is no room for it in /dev/shm.
    """
    descriptor, _ = storage._share_fd_cpu_()
    yield storage.data_ptr()
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(nothing, descriptor, inheritable=False)  # torch closes it when the storage dies
    os.close(nothing)


def is_flat_parameter(param: torch.Tensor) -> bool:
    """Return whether ``param`` is a flat parameter of FullyShardedDataParallel."""
    return bool(getattr(param, "_is_flat_param", False)) or type(param).__name__ == "FlatParameter"


def is_flattened(param: torch.Tensor) -> bool:
    """Return whether FullyShardedDataParallel manages ``param``, as a part of a flat parameter or as one."""
    return bool(getattr(param, "_fsdp_flattened", False))


def steps_in_backward(param: torch.Tensor) -> bool:
    """Return whether an optimizer steps ``param`` as soon as it has its gradient."""
    return hasattr(param, "_in_backward_optimizers")


def without_conjugation(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is in the memory of ``tensor``, not copied, where torch conjugates or negates it when it is read."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor
