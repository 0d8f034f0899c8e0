"""Collectives among the ranks of a process group."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.checks import plain, reduction, seconds_of, shape_of
from pycomm.collectives.channel import Channel
from pycomm.collectives.transport import TRANSPORTS
from pycomm.collectives.transport.algorithms import AlgorithmSelector
from pycomm.collectives.transport.choice import choose_transport
from pycomm.collectives.transport.own_group import Place, found_group, group_of, place_of, timeout_seconds
from pycomm.worker import Work

if TYPE_CHECKING:
    from pycomm.collectives.transport.gpu import GpuWork
    from pycomm.schedule.network import Network
    from pycomm.schedule.program import Program
    from pycomm.schedule.table import Table

_AUTO = "auto"
_NOT_INITIALIZED = (
    "torch.distributed is not initialized: call torch.distributed.init_process_group() first (under torchrun, or with "
    "rank and world_size)"
)


class _Messages:
    """Messages between two ranks: the part of :class:`Communicator` that is not collective."""

    channel: Channel

    def send(self, x: Any, dst: int, tag: int = 0) -> None:
        """Send ``x`` to another rank of this group, which calls :meth:`recv`. Any dtype.

        In CPU memory the message is buffered, and the call returns before ``dst`` receives it, so ranks may send and
        receive in any order. It is not collective; other threads may run collectives meanwhile. Messages sent and not
        yet received take at most ``PYCOMM_BUFFER_BYTES`` (1 GiB, or a quarter of the memory if that is less): if the
        buffer is full, the call waits.

        Args:
            x: array.
            dst: rank of the receiver.
            tag: number below 2³⁰ that the receiver passes too; 0 on a GPU.

        Raises:
            ValueError: ``x`` alone is larger than the buffer.
            CommError: ``dst`` died or closed its communicator; or the buffer stayed full for the timeout, or must stay
                so because ``dst`` itself waits for this rank. Over shared memory the communicator remains usable,
                unlike after other errors.
        """
        self.channel.side(x).send(x, dst, tag)

    def recv(self, x: Any, src: int | None = None, tag: int = 0) -> int | None:
        """Overwrite ``x`` with an array of equal size that rank ``src`` sends with ``tag``. Any dtype.

        Messages of one rank with one tag arrive in the order sent. In CPU memory the sender's rank is returned, and
        ``src=None`` takes a message of any rank. On a GPU, ``src`` must be given, and ``None`` is returned.

        Raises:
            ValueError: the message has another size than ``x``. It is lost.
            CommError: no message came within the timeout, or ``src`` died or closed its communicator before it sent
                one. Over shared memory the communicator remains usable, unlike after other errors.
        """
        return self.channel.side(x).recv(x, src, tag)

    @contextlib.contextmanager
    def group(self, device: torch.device | int) -> Iterator[None]:
        """Start the operations called inside, on arrays of one GPU, together at the end of the block.

        Sends and receives that depend on each other must be in one group. If the block raises, this rank executes none
        of them.
        """
        index = torch.device("cuda", device).index if isinstance(device, int) else device.index
        with self.channel.gpu(0 if index is None else index).grouped():
            yield


class Communicator(_Messages):
    """Communicator: collectives among the ranks of ``process_group``.

    Arrays in CPU memory (tensors, numpy arrays, objects with ``__dlpack__``) go through shared memory between
    processes of one host, and through torch.distributed between hosts, on a group of the communicator's own
    with the same ranks and backend. Where hosts have several ranks, both are combined: the ranks of a host reduce
    among themselves first, so that links carry each byte once. Arrays in CUDA memory (tensors, cupy arrays,
    objects with ``__cuda_array_interface__``) go through NCCL. All ranks must call the same operations in the
    same order, with the same dtypes and sizes, on arrays in the same kind of memory. Arrays that are written
    must be contiguous; on a GPU, those that are read too.

    On a GPU, an operation is enqueued on the communicator's own stream, and the call returns. It starts
    after all work submitted so far to the array's stream (torch's current one, or the one in the array's
    interface), and work submitted to that stream later starts after the operation.

    Creating a communicator is itself collective, and so is its first operation on a GPU, which creates
    NCCL's communicator. It is a context manager; a communicator dropped without :meth:`close` is closed by
    the garbage collector.

    Args:
        process_group: an initialized group, or a one-dimensional ``DeviceMesh`` (``mesh["dp"]``); the
            default group if ``None``.
        timeout: limit of every single wait; seconds or ``timedelta``. ``None``: the group's own, by
            torch's default half an hour. A peer that *dies* is noticed within a second regardless.
        transport: "auto", or "shared_memory" (one host), "tcp" (any hosts), "hierarchical" (several hosts, some
            with several ranks) or "torch" (the process group's own backend) to require one. The environment
            variable ``PYCOMM_TRANSPORT`` stands in for "auto".
        network: description of the network, by which ``algorithm="auto"`` chooses: a
            :class:`pycomm.schedule.Network`, the name of a predefined one, or a file from
            ``pycomm plan calibrate``. ``None``: the file or name in the environment variable
            ``PYCOMM_NETWORK``. All ranks use rank 0's. Without one, if it was calibrated over another transport, and
            over transport "torch", "auto" means "native".

    Attributes:
        rank, size: rank of this process in the group, and number of ranks.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        CommError: from any operation, if a peer died or gave up, or the timeout passed. The communicator
            can no longer be used. On a GPU the error is raised by a later operation, or by :meth:`check`,
            since no call waits there; anything computed from the results is invalid.
        ValueError, TypeError: from any operation, on every rank, before data moves: the ranks call
            different operations, or an argument is wrong on this rank or on another. On a GPU, only the
            rank with the wrong argument knows, and the others run into the timeout.
        RuntimeError: from an operation on a GPU, on every rank: there is no driver or no usable NCCL.
        MemoryError: there is too little memory for the shared segments.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        timeout: timedelta | float | None = None,
        *,
        transport: str = "auto",
        network: Network | str | os.PathLike[str] | None = None,
    ) -> None:
        seconds, problem = _check_arguments(timeout, transport)
        self._network = network
        if not dist.is_available() or not dist.is_initialized():
            raise problem or RuntimeError(_NOT_INITIALIZED)
        group, misplaced = found_group(lambda: group_of(process_group, "process_group"))
        self._timeout = timeout_seconds(seconds, group)
        self._open(place_of(group), transport, problem or misplaced)

    def _open(self, place: Place, transport: str, problem: Exception | None = None) -> None:
        """Meet the other ranks at ``place``; see :func:`choose_transport`."""
        transport_used = choose_transport(place, "auto" if problem else transport, self._timeout, problem)
        self.channel = Channel(transport_used, self._timeout)
        """Internal."""
        self.place = place
        """Internal: where its ranks have met."""
        self.rank: int = self.channel.rank
        self.size: int = self.channel.size
        # Also closes a dropped one, and before the interpreter ends: no communication thread may be left inside an
        # operation.
        self._finalizer = weakref.finalize(self, self.channel.close)
        self._selector = AlgorithmSelector(self.rank, self.size)
        try:
            share = self.channel.all_gather_bytes
            self.channel.native = self._selector.agree(self._network, self.transport, share)
            is_native = _AUTO in self.channel.native
            self._at_once: Callable[[Any, Any], bool] = self.channel.at_once if is_native else lambda x, op: False
        except BaseException:
            self.close()
            raise

    def move(self, place: Place) -> None:
        """Become the communicator of the ranks that meet at ``place``. Collective among these.

        No operation may be in progress. Tensors from :meth:`empty` remain valid, but no longer lie in shared memory.
        """
        self.close("it goes on among other ranks")
        self._open(place, "auto")

    @property
    def transport(self) -> str:
        """Name of the transport for arrays in CPU memory: "shared_memory", "tcp", "hierarchical" or "torch"."""
        return self.channel.transport.name

    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """Internal: ranks by host; without shared memory each is a host."""
        return self.channel.transport.hosts

    def empty(
        self,
        shape: int | tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
        *,
        symmetric: bool = False,
    ) -> torch.Tensor:
        """Return an uninitialized tensor in memory that the transport can access directly.

        On a GPU NCCL requires that all ranks pass such tensors to an operation, at equal offsets, or none does.

        Not collective: ranks may allocate different tensors at any time. Operations on such tensors (on all ranks) move
        each byte only once. The memory lives as long as the tensor.

        Args:
            shape, dtype: of the tensor.
            device: the CPU if ``None``.
            symmetric: all ranks make such a tensor, and pass it whole to the same operations in the same order. Its
                first operation is then the collective that lets NCCL 2.29.7 or newer use symmetric kernels.

        Raises:
            TypeError: ``shape`` or ``dtype`` has the wrong type.
            ValueError: a length is negative, or ``device`` is neither the CPU nor a GPU.
            MemoryError: there is too little memory; the message says how much was needed and found.
        """
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {dtype!r}, wanted a torch.dtype")
        dims = shape_of(shape)
        kind = "cpu" if device is None else torch.device(device).type
        if kind == "cuda":
            from pycomm.collectives.transport import registered

            return registered.empty(dims, dtype, torch.device(device), symmetric)  # type: ignore[arg-type]
        if kind != "cpu":
            raise ValueError(f"device is {device!r}, wanted the CPU or a GPU")
        return self.channel.transport.empty(dims, dtype)

    def all_reduce(
        self, x: Any, op: str = "sum", algorithm: str | Table = _AUTO, async_op: bool = False
    ) -> Work | GpuWork | None:
        """Reduce ``x`` over all ranks, in place; all ranks end with the same bits.

        float16 and bfloat16 are accumulated in float32 and rounded once, with these exceptions. Over several hosts with
        several ranks each ("hierarchical") a sum is rounded once on each host and once between hosts. On a GPU NCCL
        computes it: it adds in the half type (NVLink switches, NCCL's NVLS, accumulate in float32), and for "mean"
        divides each term before it adds. A schedule rounds sums of half types after every round, "direct" once, in
        shared memory after every addition; it computes their means from sums in float32.

        Args:
            x: array of float32, float16, bfloat16, float64, int8, uint8, int32 or int64.
            op: "sum", "mean" (floating-point dtypes only; "avg" is the same), "min", "max", "product"; of integers,
                "band", "bor" or "bxor" too, which NCCL itself does not have.
            algorithm: "native" is the transport's own; NCCL chooses by size and topology. A name that
                :func:`pycomm.schedule.by_name` knows ("halving_doubling", "double_tree(64)"), or a
                schedule for this number of ranks, even one of your own, is verified once and then run by
                messages; not over transport "torch". "auto" is the fastest one according to ``network`` (see above), or
                "native" without a network. On a GPU, "auto" is "native", and "ring" is NCCL's own, on a second
                communicator created with ``NCCL_ALGO=Ring`` set in the environment.
            async_op: return at once an object that has ``wait()`` and ``is_completed()``; operations still run
                in the order of the calls. On a GPU, ``wait()`` makes torch's current stream and the array's
                wait, not the host.
        """
        if algorithm is _AUTO and not async_op and self._at_once(x, op):
            return None
        if type(algorithm) is not str:
            algorithm = plain(algorithm)
        op, side = reduction(op), self.channel.side(x)
        is_native = isinstance(algorithm, str) and algorithm in side.native
        program = None if is_native else self._program(algorithm, x)
        if program is not None:
            return side.run_program(program, x, op, async_op)
        return side.all_reduce(x, op, async_op, algorithm)

    def reduce(self, x: Any, dst: int, op: str = "sum", async_op: bool = False) -> Work | GpuWork | None:
        """Reduce ``x`` over all ranks into ``x`` of rank ``dst``; the others' stay, and must be writable too.

        dtypes and ``op`` as in :meth:`all_reduce`.
        """
        return self.channel.side(x).run("reduce", async_op, x, dst, reduction(op))

    def reduce_scatter(self, out: Any, x: Any, op: str = "sum", async_op: bool = False) -> Work | GpuWork | None:
        """Reduce ``x`` over all ranks and write part ``rank`` of the result into ``out``.

        ``x`` has ``size`` times as many elements as ``out``; dtypes and ``op`` as in :meth:`all_reduce`.
        """
        return self.channel.side(out).run("reduce_scatter", async_op, out, x, reduction(op))

    def all_gather(self, out: Any, x: Any, async_op: bool = False) -> Work | GpuWork | None:
        """Write all ranks' ``x``, in rank order, into ``out`` (``size`` times as many elements). Any dtype."""
        return self.channel.side(out).run("all_gather", async_op, out, x)

    def all_to_all(self, out: Any, x: Any, async_op: bool = False) -> Work | GpuWork | None:
        """Send part p of ``x`` to rank p, where it becomes part ``rank`` of ``out``.

        Both arrays consist of as many equal parts as there are ranks. Any dtype; on a GPU as in :meth:`all_reduce`.
        """
        side = self.channel.side(x)
        return (self.channel.side(out) if side is self.channel else side).run("all_to_all", async_op, out, x)

    def broadcast(self, x: Any, src: int, async_op: bool = False) -> Work | GpuWork | None:
        """Overwrite ``x`` with the ``x`` of rank ``src`` (a rank of this group). Any dtype."""
        return self.channel.side(x).run("broadcast", async_op, x, src)

    def check(self) -> None:
        """Raise CommError if an operation on a GPU has failed since, by an error of NCCL or by the timeout."""
        self.channel.check_gpus()

    def refuse(self, reason: str) -> None:
        """Stand in for an operation that only the other ranks can call; they get a ValueError."""
        self.channel.refuse(reason)

    def barrier(self) -> None:
        """Wait for all ranks, on the host."""
        self.channel.run("barrier", False)

    def close(self, reason: str | None = None) -> None:
        """Release all resources; tensors from :meth:`empty` remain valid. Not collective, idempotent.

        All ranks should call it, after the same operations: a rank that goes on gets a CommError in its next one. On a
        GPU, operations that other ranks have not joined within a second are aborted.

        Peers that still wait for this rank get a :class:`CommError`, over shared memory with the ``reason``. Messages
        already sent can still be received: over shared memory at any time, otherwise the call waits for their
        receivers, up to 5 seconds (half a second with a ``reason``).
        """
        self.channel.close(reason)
        self._finalizer.detach()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(None if kind is None else f"it closed its communicator after a {kind.__name__}")

    def __repr__(self) -> str:
        return f"Communicator(rank={self.rank}, size={self.size}, transport={self.transport!r})"

    def own_share(self, x: torch.Tensor, algorithm: str | Table) -> slice | None:
        """Internal: what :meth:`Channel.own_share` says, if ``algorithm`` is the transport's own."""
        if self.channel.transport.own_share is None or self._selector.find(algorithm, x) is not None:
            return None
        return self.channel.own_share(x)

    def _program(self, algorithm: str | Table, x: Any) -> Program | None:
        try:
            return self._selector.find(algorithm, x)
        except Exception as error:  # a foreign object may raise anything
            self.channel.refuse_and_raise(error)


def communicator_at(place: Place, timeout: float, transport: str = "auto", network: Any = None) -> Communicator:
    """Return the communicator of the ranks that meet at ``place``. Collective among them."""
    made = Communicator.__new__(Communicator)
    made._timeout, made._network = timeout, network
    made._open(place, transport)
    return made


def communicator_beside(other: Communicator) -> Communicator:
    """Return another communicator of the same ranks as ``other``, over the same transport. Collective."""
    return communicator_at(other.place, other._timeout, other.transport, other._network)


def _check_arguments(timeout: timedelta | float | None, transport: str) -> tuple[float | None, Exception | None]:
    """Return the timeout in seconds (``None``: the group's) and the error, to be raised once the other ranks know."""
    seconds = None
    try:
        seconds = None if timeout is None else seconds_of(timeout)
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r}, wanted one of {', '.join(TRANSPORTS)}")
    except Exception as error:  # a foreign object may raise anything
        return seconds, error
    return seconds, None
