"""Interface of all transports. The arguments and errors are those of :class:`pycomm.Communicator`."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

import pycomm._native as _native

Message = tuple[int, torch.Tensor]
"""Peer, and the tensor to send to it or receive from it: contiguous, one-dimensional, not empty."""


class Transport(Protocol):
    """Collectives among ``size`` ranks: in place and blocking, with every wait limited to ``timeout`` seconds.

    All ranks call the same operations in the same order with the same sizes and dtypes. Before any data
    moves, the ranks compare their operations; a difference, or a wrong argument on one rank, is an error
    on all of them.

    Attributes:
        name: name of the transport, as in ``Communicator.transport``.
        rank, size: rank of this process, and number of ranks.
    """

    name: str
    rank: int
    size: int
    skip_checks: bool | Literal["after the next"]
    """While true, the ranks need not compare operations, because these follow from ones that were compared, or from
    the next one, which is compared and makes it true."""

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
        """Stand in for an operation whose arguments are wrong on this rank; the other ranks get a ValueError."""

    def close(self, reason: str) -> None:
        """Release all resources. Peers that wait for this rank are told ``reason``, if the transport can do so."""


def bytes_of(x: Any, name: str) -> npt.NDArray[np.uint8]:
    """Return the memory of a CPU array, or of another object with the buffer protocol, as bytes to read.

    Raises:
        TypeError, ValueError: ``x`` is no such object; the message starts with ``name``.
    """
    array: Any = _native.HostArray(x, name, False, True)
    return np.frombuffer(array, np.uint8)
