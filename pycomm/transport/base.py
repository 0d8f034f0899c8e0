"""What every transport can do. The arguments and errors are those of :class:`pycomm.Communicator`."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

import pycomm._native as _native

Message = tuple[int, torch.Tensor]
"""Peer, and what goes there or comes from there: contiguous, one-dimensional, not empty."""


class Transport(Protocol):
    """The collectives among ``size`` ranks, in place, blocking, each wait at most ``timeout`` s.

    All ranks call the same operations in the same order with the same sizes and dtypes. Before any
    data moves, ranks compare what they are about to do; a difference, or a wrong argument on one
    rank, is an error on all.
    """

    name: str
    rank: int
    size: int
    skip_checks: bool
    """While true, ranks need not compare: what they do follows from what they compared before."""

    interruptible: bool
    """Whether :meth:`close` ends an operation that is in progress on another thread."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...
    def all_reduce(self, x: Any, op: str, timeout: float) -> None: ...
    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None: ...
    def all_gather(self, out: Any, x: Any, timeout: float) -> None: ...
    def all_to_all(self, out: Any, x: Any, timeout: float) -> None: ...
    def broadcast(self, x: Any, src: int, timeout: float) -> None: ...
    def barrier(self, timeout: float) -> None: ...

    def refuse(self, reason: str, timeout: float) -> None:
        """Stand in for an operation whose arguments are wrong on this rank; the others get told."""

    def close(self, reason: str) -> None:
        """Give everything back. Peers that wait for this rank are told ``reason``, where the transport can."""


def bytes_of(x: Any, name: str) -> npt.NDArray[np.uint8]:
    """The memory of an array, or of anything with the buffer protocol, in CPU memory, to read.

    Raises:
        TypeError, ValueError: it is none; with ``name``.
    """
    array: Any = _native.HostArray(x, name, False, True)
    return np.frombuffer(array, np.uint8)
