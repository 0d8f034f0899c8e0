"""A world of Horovod's in ranks that already are a process group, for the length of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch

import pycomm.horovod as hvd


@contextlib.contextmanager
def horovod() -> Iterator[ModuleType]:
    """Yield ``pycomm.horovod``, initialized, and shut it down when all ranks are done."""
    hvd.init()
    try:
        yield hvd
        hvd.barrier()
    finally:
        hvd.shutdown()


def values_of(rank: int, shape: tuple[int, ...] = (5, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers that are different on every rank and in every place, and exactly summable."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 3 + rank * 7) % 11 + 1
    return numbers.reshape(shape).to(dtype)


def all_values(size: int, shape: tuple[int, ...] = (5, 3), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of all ranks, stacked."""
    return torch.stack([values_of(rank, shape, dtype) for rank in range(size)])


def grad_of(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``, which must have one."""
    assert x.grad is not None
    return x.grad
