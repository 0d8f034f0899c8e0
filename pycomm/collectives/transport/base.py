"""Interface of all transports. Arguments and errors are as for :class:`pycomm.Communicator`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

import pycomm._native as _native
from pycomm.collectives.recorder import Recorder

if TYPE_CHECKING:
    from pycomm.schedule.program import Program

BUFFER_VARIABLE = "PYCOMM_BUFFER_BYTES"
_BUFFER_BYTES = 1 << 30

OwnShare = Callable[[Any], tuple[int, int]]
AllReduceApart = Callable[[Any, str, int, Sequence[Any], float], float]
ReduceScatterApart = Callable[[Any, Sequence[Any], str, Sequence[Any], float], float]

all_reduce_at_once = _native.all_reduce_at_once
"""Makes the function that reduces a small tensor in one call of C++, see the channel's ``at_once``."""


class Receipt(Protocol):
    """Posted receive. It keeps the array until it is completed or cancelled."""

    def wait(self, timeout: float) -> int:
        """Return the rank whose message the array now holds.

        Raises:
            ValueError: the message has another size than the array. It is lost.
            CommError: no message came within ``timeout`` seconds, and the receive remains posted; or none can come,
                since the sender died, gave up or closed.
        """

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, at once."""

    def cancel(self) -> bool:
        """Withdraw it, so that the array is not written to any more; return whether no message had come."""


class HostMemory(NamedTuple):
    """Memory shared by the ranks of one host. Blocks have the buffer protocol.

    Attributes:
        allocate: returns a new block, given its number of bytes.
        offset_of: returns the offset in this rank's memory of an address and number of bytes; -1: not there.
        of_rank: returns a block that a rank has allocated and keeps, given the rank, offset and number of bytes.
        num_ranks: number of these ranks.
    """

    allocate: Callable[[int], _native.Block]
    offset_of: Callable[[int, int], int]
    of_rank: Callable[[int, int, int], _native.PeerMemory]
    num_ranks: int


class Transport(Protocol):
    """Collectives among ``size`` ranks: in place and blocking, with every wait limited to ``timeout`` seconds.

    All ranks call the same operations in the same order with the same sizes and dtypes. Before any data moves, the
    ranks compare their operations; a difference, or a wrong argument on one rank, is an error on all of them.
    """

    name: str
    rank: int
    size: int
    skip_checks: bool | Literal["after the next"]
    """While true, ranks need not compare operations, as compared ones imply them. "after the next" becomes true after
    the next operation, which is compared."""

    host_memory: HostMemory | None
    """``None`` without shared memory."""

    hosts: Sequence[Sequence[int]]
    """Ranks by host, in rising order; hosts in the order of their first ranks. Ranks of a host share memory; without
    shared memory, each rank counts as a host."""

    interruptible: bool
    """Whether :meth:`close` ends an operation in progress on another thread."""

    buffer_limit: int
    """Number of bytes of messages that may be sent and not yet received."""

    recorder: Recorder
    """Recorder of the operations, set once the transport is chosen for a group."""

    own_share: OwnShare | None
    """Returns the bounds of the elements that this rank reduces in the next all-reduce of an array, from :meth:`empty`,
    of this size. ``None``: ranks do not split the reduction."""

    all_reduce_apart: AllReduceApart | None
    """``all_reduce_apart(x, op, begin, pieces, timeout)``: all-reduce where this rank's input for its own share, from
    ``begin`` on, may lie outside ``x``. ``pieces`` hold as many elements in order; some may lie in ``x``, in place.
    Ranks without pieces call it, or :meth:`all_reduce`, too. Returns the largest magnitude of all ranks' pieces outside
    ``x``; NaN if they have one. ``None`` where :attr:`own_share` is."""

    reduce_scatter_apart: ReduceScatterApart | None
    """``reduce_scatter_apart(out, xs, op, pieces, timeout)``: :meth:`reduce_scatter_v` where ``pieces``, as above, take
    the place of ``xs[rank]``, which is ``out``. Other ranks may call :meth:`reduce_scatter_v`. Returns the largest
    magnitude of this rank's pieces outside ``out``. ``None`` where :attr:`own_share` is."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...
    def all_reduce(self, x: Any, op: str, timeout: float) -> None: ...
    def reduce_scatter(self, out: Any, x: Any, op: str, timeout: float) -> None: ...
    def all_gather(self, out: Any, x: Any, timeout: float) -> None: ...
    def all_to_all(self, out: Any, x: Any, timeout: float) -> None: ...
    def reduce(self, x: Any, dst: int, op: str, timeout: float) -> None:
        """Reduce ``x`` over all ranks into ``x`` of rank ``dst``; the others' stay as they are."""

    def all_to_all_v(self, outs: Sequence[Any], xs: Sequence[Any], timeout: float) -> None:
        """Write ``xs[p]`` of this rank into ``outs[rank]`` of every rank p.

        Both hold one array per rank, of any dtype and length, or ``None`` for nothing. ``xs`` may repeat an array;
        ``outs[rank]`` may be ``xs[rank]``; otherwise no array of ``outs`` overlaps another one. If the sender's and the
        receiver's array differ in bytes, every rank raises a ValueError that names the pair, before data moves.
        """

    def reduce_scatter_v(self, out: Any, xs: Sequence[Any], op: str, timeout: float) -> None:
        """Write the reduction of all ranks' ``xs[rank]`` into ``out``, which may be this rank's own ``xs[rank]``.

        ``xs`` holds one array per rank, of any length and of ``out``'s dtype, or ``None`` for an empty one. All ranks'
        arrays for one rank must be as long as its ``out``: otherwise ValueError, as above.
        """

    def all_gather_v(self, outs: Sequence[Any], x: Any, timeout: float) -> None:
        """Write ``x`` of every rank p, of any dtype and length, into ``outs[p]``, which may be ``x`` for p = rank.

        ``outs`` holds one array per rank, or ``None`` for an empty one. Lengths and overlaps: see :meth:`all_to_all_v`.
        """

    def broadcast(self, x: Any, src: int, timeout: float) -> None: ...
    def run_program(self, program: Program, x: Any, op: str, timeout: float) -> None:
        """All-reduce ``x`` by this rank's program of a schedule that all ranks run."""

    def barrier(self, timeout: float) -> None: ...

    def send(self, x: Any, dst: int, tag: int, timeout: float) -> None:
        """Send ``x`` to rank ``dst``; return once it is buffered, even if ``dst`` has not received it.

        Messages are not collective: they may be sent and received in any order, and by other threads meanwhile.

        Raises:
            ValueError: ``x`` alone is larger than ``buffer_limit``.
            CommError: ``dst`` died, gave up or closed; or the buffer stayed full for ``timeout`` seconds, or must.
        """

    def receive(self, x: Any, src: int | None, tag: int) -> Receipt:
        """Post a receive of the first message with ``tag`` from ``src``, or from any rank, into ``x``.

        Messages of a rank with one tag are received in the order sent, by receives in the order posted.
        """

    def give_up_stopped_after(self, seconds: float) -> None:
        """Fail operations once the process of a rank of this host has been stopped for ``seconds``."""

    def refuse(self, reason: str, timeout: float) -> None:
        """Stand in for an operation whose arguments are wrong on this rank; the other ranks get a ValueError."""

    def hand_over(self, patience: float) -> None:
        """Wait, for at most ``patience`` seconds, until this rank's messages can be received without it."""

    def close(self, reason: str) -> None:
        """Release all resources. Peers that wait for this rank get the ``reason`` if the transport can send it."""


def bytes_of(x: Any, name: str) -> npt.NDArray[np.uint8]:
    """Return a CPU array, or another object with the buffer protocol, as bytes to read.

    Raises:
        TypeError, ValueError: ``x`` is no such object; the message starts with ``name``.
    """
    array: Any = _native.HostArray(x, name, False, True)
    return np.frombuffer(array, np.uint8)


def buffer_limit() -> int:
    """Return how many bytes a rank may buffer: the environment variable's value, else 1 GiB or a quarter of the memory.

    Raises:
        ValueError: the variable is no number of bytes.
    """
    text = os.environ.get(BUFFER_VARIABLE)
    if text is None:
        return min(_BUFFER_BYTES, _native.available_memory() // 4)
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ValueError(f"the environment variable {BUFFER_VARIABLE} is {text!r}, wanted a number of bytes")
    return int(text)
