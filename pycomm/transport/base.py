"""Interface of all transports. The arguments and errors are those of :class:`pycomm.Communicator`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

import pycomm._native as _native
from pycomm.recorder import Recorder
from pycomm.schedule.program import Program

Message = tuple[int, torch.Tensor]
"""Peer, and the tensor to send to it or receive from it: contiguous, one-dimensional, not empty."""


BUFFER_VARIABLE = "PYCOMM_BUFFER_BYTES"
_BUFFER_BYTES = 1 << 30

OwnShare = Callable[[Any], tuple[int, int]]
AllReduceApart = Callable[[Any, str, int, Sequence[Any], float], float]


class Receipt(Protocol):
    """Receive that has been posted. It keeps the array until it is completed or cancelled."""

    def wait(self, timeout: float) -> int:
        """Return the rank whose message the array now holds.

        Raises:
            ValueError: the message has another size than the array. It is lost.
            CommError: no message came within ``timeout`` seconds, in which case the receive remains posted; or none
                can come, since the rank that it waits for died, gave up or closed.
        """

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""

    def cancel(self) -> bool:
        """Withdraw it: the array is not written to any more. Returns whether that was before a message came."""


class HostMemory(NamedTuple):
    """Memory that the ranks of one host reach.

    Attributes:
        allocate: returns a block of so many bytes, an object with the buffer protocol.
        offset_of: returns where the bytes at an address, so many, lie in this rank's memory; -1: not there.
        of_rank: returns memory of a rank: at an offset in it, so many bytes, which that rank has allocated and keeps.
            An object with the buffer protocol.
        num_ranks: number of these ranks.
    """

    allocate: Callable[[int], _native.Block]
    offset_of: Callable[[int, int], int]
    of_rank: Callable[[int, int, int], _native.PeerMemory]
    num_ranks: int


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

    host_memory: HostMemory | None
    """``None`` if arrays travel in other ways."""

    hosts: Sequence[Sequence[int]]
    """Ranks by host, in rising order; hosts in the order of their first ranks. What ranks of one host have for each
    other goes through memory that they share: where there is none, each rank counts as a host."""

    interruptible: bool
    """Whether :meth:`close` ends an operation that is in progress on another thread."""

    buffer_limit: int
    """How many bytes of messages may be sent and not yet received."""

    recorder: Recorder
    """Recorder of the operations, once the transport has been chosen for a group."""

    own_share: OwnShare | None
    """Returns where those elements of an array from :meth:`empty` begin and end that this rank will reduce itself in
    the next all-reduce of one as large. ``None``: no rank does what the others then need not."""

    all_reduce_apart: AllReduceApart | None
    """``all_reduce_apart(x, op, begin, pieces, timeout)``: all-reduce to which what this rank has for those elements
    may lie elsewhere. ``pieces`` are as many elements, one piece after the other, of which some may be in ``x`` at
    their place. Ranks without any call it, or :meth:`all_reduce`, all the same. Returns the largest magnitude in what
    is not in place, of all ranks; NaN if there is one. ``None`` where :attr:`own_share` is."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...
    def all_reduce(self, x: Any, op: str, timeout: float) -> None: ...
    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None: ...
    def all_gather(self, out: Any, x: Any, timeout: float) -> None: ...
    def all_to_all(self, out: Any, x: Any, timeout: float) -> None: ...
    def reduce(self, x: Any, dst: int, op: str, timeout: float) -> None:
        """Reduce ``x`` over all ranks into that of rank ``dst``; the others' stay as they are."""

    def all_to_all_v(self, outs: Sequence[Any], xs: Sequence[Any], timeout: float) -> None:
        """Send ``xs[p]`` to rank p, whose ``outs[rank]`` it becomes.

        Both hold an array, of any dtype and length, or ``None`` for nothing, for each rank. ``xs`` may hold an
        array several times; ``outs[rank]`` may be ``xs[rank]``, and else no array of ``outs`` overlaps another
        one. An array and what it becomes must have as many bytes: otherwise ValueError on every rank, naming the
        pair, before data moves.
        """

    def reduce_scatter_v(self, out: Any, xs: Sequence[Any], op: str, timeout: float) -> None:
        """Write the reduction of all ranks' ``xs[rank]`` into ``out``, which may be this rank's own ``xs[rank]``.

        ``xs`` holds an array, of any length and of ``out``'s dtype, or ``None`` for an empty one, for each rank.
        All ranks' arrays for one rank must be as long as its ``out``: otherwise ValueError, as above.
        """

    def all_gather_v(self, outs: Sequence[Any], x: Any, timeout: float) -> None:
        """Write the ``x`` of every rank p, of any dtype and length, into ``outs[p]``, which may be ``x`` for p = rank.

        ``outs`` holds an array, or ``None`` for an empty one, for each rank. Lengths and overlaps: as of
        :meth:`all_to_all_v`.
        """

    def broadcast(self, x: Any, src: int, timeout: float) -> None: ...
    def run_program(self, program: Program, x: Any, op: str, timeout: float) -> None:
        """All-reduce ``x`` by this rank's part of a schedule that all ranks have."""

    def barrier(self, timeout: float) -> None: ...

    def send(self, x: Any, dst: int, tag: int, timeout: float) -> None:
        """Send ``x`` to rank ``dst``; return once it has been copied, whether or not ``dst`` receives it already.

        Messages are no collectives: they may be sent and received in any order, and by other threads meanwhile.

        Raises:
            ValueError: ``x`` alone is larger than ``buffer_limit``.
            CommError: ``dst`` died, gave up or closed; or there was no room for ``timeout`` seconds, or cannot be.
        """

    def receive(self, x: Any, src: int | None, tag: int) -> Receipt:
        """Receive into ``x`` the first message with ``tag`` from ``src``, or from any rank; returns at once.

        Messages of a rank with one tag are received in the order in which they were sent, by receives in the order
        of these calls.
        """

    def give_up_stopped_after(self, seconds: float) -> None:
        """Let operations fail because of a rank whose process they have seen stopped for so long, not at the timeout.

        Only ranks of this host are seen.
        """

    def refuse(self, reason: str, timeout: float) -> None:
        """Stand in for an operation whose arguments are wrong on this rank; the other ranks get a ValueError."""

    def hand_over(self, patience: float) -> None:
        """Wait, for at most ``patience`` seconds, until what this rank has sent can be received without it."""

    def close(self, reason: str) -> None:
        """Release all resources. Peers that wait for this rank are told ``reason``, if the transport can do so."""


def bytes_of(x: Any, name: str) -> npt.NDArray[np.uint8]:
    """Return the memory of a CPU array, or of another object with the buffer protocol, as bytes to read.

    Raises:
        TypeError, ValueError: ``x`` is no such object; the message starts with ``name``.
    """
    array: Any = _native.HostArray(x, name, False, True)
    return np.frombuffer(array, np.uint8)


def buffer_limit() -> int:
    """Return how many bytes a rank may buffer: what the environment says, else 1 GiB or a quarter of the memory.

    Raises:
        ValueError: the environment variable is no number of bytes.
    """
    text = os.environ.get(BUFFER_VARIABLE)
    if text is None:
        return min(_BUFFER_BYTES, _native.available_memory() // 4)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"the environment variable {BUFFER_VARIABLE} is {text!r}, wanted a number of bytes")
    return int(text)
