"""Channel of a process group: its transport, the communication thread, and the queues of its GPUs.

:class:`pycomm.Communicator` is the public interface; this one is internal. :meth:`Channel.side` decides once per
operation between CPU and GPU: it returns the channel, which calls the transport on this thread or its own, or a
:class:`GpuQueue`, which calls NCCL with a stream. Both have ``native``, ``run``, ``run_program``, ``send`` and
``recv``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from pycomm import threads
from pycomm.collectives.freed_memory import keep_freed_memory
from pycomm.collectives.layout import gpu_of
from pycomm.collectives.recorder import Recorder, from_here
from pycomm.collectives.recorder.watch import watch
from pycomm.collectives.transport import late_ranks
from pycomm.collectives.transport.base import Transport, all_reduce_at_once, bytes_of
from pycomm.errors import CommError
from pycomm.torch_internals import raw_stream
from pycomm.worker import Work, Worker

if TYPE_CHECKING:
    from pycomm.collectives.transport.gpu import GpuQueue, GpuWork
    from pycomm.collectives.transport.nccl import NcclTransport
    from pycomm.schedule.program import Program
    from pycomm.schedule.table import Table

_PATIENCE = 5.0
_PATIENCE_AFTER_FAILURE = 0.5
"""Seconds that closing waits for operations in progress; after a failure these cannot succeed."""


class Channel:
    """Queue of a group's operations in CPU memory, in the order of the calls, and owner of its GPU queues.

    It holds no reference to its communicator, so that garbage collection can close a dropped communicator.

    Args:
        transport: transport of arrays in CPU memory, which the channel takes over.
        timeout: limit of every single wait, in seconds.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport, self.timeout = transport, timeout
        self.rank, self.size = transport.rank, transport.size
        self.worker = Worker(f"pycomm-{self.rank}", functools.partial(_refusal, self.rank))
        self.farewell: Callable[[], str] = _farewell
        """Returns the reason that waiting peers get when this is closed without one."""
        self.companions: list[Channel] = []
        """Further channels over the same ranks, closed with this one."""
        self.let_end: Callable[[], object] = lambda: None
        """Waits a little for an operation that this rank need not see the end of, but others do, before this closes."""
        self.native: tuple[str, ...] = ("auto", "native")
        """Names that always mean the transport's own algorithm."""
        self.at_once = all_reduce_at_once(transport.all_reduce, self.worker.unfinished, timeout)
        """``at_once(x, op)`` reduces a small tensor in CPU memory in one call of C++, or returns ``False``."""
        self._unchecked = _Unchecked(transport)
        self._gpus: dict[int, GpuQueue] = {}
        self._pid = os.getpid()
        self._once = threading.Lock()  # acquired by the first call of close(), on whichever thread
        late_ranks.add(transport.recorder)
        keep_freed_memory()

    @property
    def recorder(self) -> Recorder:
        """Recorder of the operations in CPU memory."""
        return self.transport.recorder

    def side(self, x: Any) -> Channel | GpuQueue:
        """Return the queue for operations on ``x``: this channel, or the queue of ``x``'s GPU."""
        if isinstance(x, torch.Tensor) and not x.is_cuda:  # at once, for latency
            return self
        device = gpu_of(x)
        return self if device is None else self.gpu(device)

    # Arrays in CPU memory.

    def all_reduce(self, x: Any, op: str, async_op: bool, algorithm: str | Table) -> Work | None:
        """Reduce ``x`` over all ranks by the transport's own algorithm; ``algorithm`` is one of its names."""
        if not async_op and (not self.worker.unfinished or self.worker.ident == get_ident()):  # at once, for latency
            self.transport.all_reduce(x, op, self.timeout)
            return None
        return self.run("all_reduce", async_op, x, op)

    def run(self, operation: str, async_op: bool, *args: Any) -> Work | None:
        """Run the transport's ``operation`` after all earlier ones."""
        if not async_op and (not self.worker.unfinished or self.worker.ident == get_ident()):  # at once, for latency
            getattr(self.transport, operation)(*args, self.timeout)
            return None
        return self.enqueue(lambda: getattr(self.transport, operation)(*args, self.timeout), async_op)

    def run_program(self, program: Program, x: Any, op: str = "sum", async_op: bool = False) -> Work | None:
        """Run this rank's program of any table, even if that is not a collective, on ``x`` in CPU memory."""
        return self.run("run_program", async_op, program, x, op)

    def send(self, x: Any, dst: int, tag: int) -> None:
        """Send ``x`` to rank ``dst``; see :meth:`pycomm.collectives.transport.base.Transport.send`."""
        self.transport.send(x, dst, tag, self.timeout)

    def recv(self, x: Any, src: int | None, tag: int) -> int:
        """Receive ``x`` from rank ``src``, or from any rank; return the sender's rank."""
        receipt = self.transport.receive(x, src, tag)
        try:
            return receipt.wait(self.timeout)
        finally:
            receipt.cancel()  # unless it is completed

    def enqueue(self, job: Callable[[], None], async_op: bool = False) -> Work | None:
        """Run ``job`` after all earlier operations: at once, on this thread, if none is in progress."""
        if async_op:
            try:
                return self.submit(job)
            except RuntimeError as error:  # no thread can be started, so no operation is in progress
                self.refuse_and_raise(RuntimeError(f"no thread could be started for an async operation: {error}"))
        if not self.worker.unfinished or self.worker.is_current():
            job()
        else:
            self.submit(job).wait()
        return None

    def submit(self, job: Callable[[], Any]) -> Work:
        """Run ``job`` on the communication thread after all earlier operations; those that it calls run at once."""
        return self.worker.submit(from_here(job))

    def skip_checks(self, *, but_first: bool = False) -> AbstractContextManager[None]:
        """Skip the comparison between ranks for the operations in the block, which compared ones must imply.

        For jobs of :meth:`submit`. Over torch.distributed the comparison costs one message per operation. Without it,
        ranks that disagree run into the timeout. ``but_first``: the first operation is compared, and implies the rest.
        """
        assert self.worker.is_current()
        self.transport.skip_checks = "after the next" if but_first else True
        return self._unchecked

    def own_share(self, x: torch.Tensor) -> slice | None:
        """Return the elements of ``x``, from :meth:`empty`, that this rank reduces in the next all-reduce of ``x``.

        ``None`` if all of this rank's input must be copied to ``x``.
        """
        share = self.transport.own_share
        return None if share is None else slice(*share(x))

    def all_reduce_apart(self, x: torch.Tensor, op: str, begin: int, pieces: Sequence[torch.Tensor]) -> float:
        """Reduce ``x`` over all ranks as :attr:`pycomm.collectives.transport.base.Transport.all_reduce_apart` does."""
        reduce = self.transport.all_reduce_apart
        assert reduce is not None
        found: list[float] = []
        self.enqueue(lambda: found.append(reduce(x, op, begin, pieces, self.timeout)))
        return found[0]

    def reduce_scatter_apart(
        self, out: torch.Tensor, xs: Sequence[torch.Tensor], op: str, pieces: Sequence[torch.Tensor]
    ) -> float:
        """Reduce as :attr:`pycomm.collectives.transport.base.Transport.reduce_scatter_apart` does."""
        reduce = self.transport.reduce_scatter_apart
        assert reduce is not None
        found: list[float] = []
        self.enqueue(lambda: found.append(reduce(out, xs, op, pieces, self.timeout)))
        return found[0]

    def reduce_scatter_v(self, out: torch.Tensor, xs: Sequence[torch.Tensor], op: str) -> None:
        """Write the reduction of all ranks' ``xs[rank]`` into ``out``, which may be, and on GPUs is, ``xs[rank]``."""
        side = self.side(out)
        if isinstance(side, Channel):
            side.run("reduce_scatter_v", False, out, xs, op)
        else:
            side.reduce_scatter_v(xs, op)

    def all_gather_v(self, outs: Sequence[torch.Tensor], x: torch.Tensor) -> None:
        """Write every rank's ``x``, of any length, into ``outs[p]``; ``outs[rank]`` may be, and on GPUs is, ``x``."""
        side = self.side(x)
        if isinstance(side, Channel):
            side.run("all_gather_v", False, outs, x)
        else:
            side.all_gather_v(outs)

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Return every rank's ``mine``, in rank order. Lengths may differ; meant for small messages."""
        try:
            content = bytes_of(mine, "mine")
        except Exception as error:  # a foreign object may raise anything
            self.refuse_and_raise(error)
        lengths = np.empty(self.size, np.int64)
        self.run("all_gather", False, lengths, np.array([len(content)], np.int64))
        longest = int(lengths.max())
        padded = np.zeros(longest, np.uint8)
        padded[: len(content)] = content
        gathered = np.empty(self.size * longest, np.uint8)
        self.run("all_gather", False, gathered, padded)
        rows = gathered.reshape(self.size, longest)
        return [rows[p, : lengths[p]].tobytes() for p in range(self.size)]

    def all_gather_number(self, mine: int) -> list[int]:
        """Return every rank's ``mine``, a 64-bit integer, in rank order, in one message."""
        gathered = np.empty(self.size, np.int64)
        self.run("all_gather", False, gathered, np.array([mine], np.int64))
        return [int(number) for number in gathered]

    # Arrays on GPUs.

    def gpu(self, device: int) -> GpuQueue:
        """Return the queue of GPU ``device``, made at first use."""
        if device not in self._gpus:
            from pycomm.collectives.transport.gpu import GpuQueue

            self._gpus[device] = GpuQueue(device, self.timeout, self._make_nccl)
        return self._gpus[device]

    def _make_nccl(self, device: int, algorithm: str, streams: Sequence[int]) -> NcclTransport:
        from pycomm.collectives.transport.nccl import NcclTransport

        made = NcclTransport(self.rank, self.size, device, self.all_gather_bytes, algorithm, self.timeout, streams)
        made.recorder = watch(made, f"{self.recorder.group}/nccl {algorithm}", self.recorder.ranks)
        return made

    def submit_on_gpu(self, device: torch.device, job: Callable[[], Any]) -> GpuWork:
        """Call ``job`` now, with the communication stream of ``device`` as torch's current stream.

        The work that it launches starts after all work submitted so far to torch's current stream. ``wait()`` of the
        result makes the stream current at that call wait for it.
        """
        return self.gpu(device.index).call(job)

    def reading(self, device: torch.device, producers: Collection[int]) -> AbstractContextManager[None]:
        """See :meth:`GpuQueue.reading`; ``producers`` are ``cudaStream_t`` as integers."""
        return self.gpu(device.index).reading(producers)

    @staticmethod
    def current_stream_of(device: torch.device) -> Callable[[], int]:
        """Return a function that returns torch's current stream as an integer, for :meth:`reading`."""
        return functools.partial(raw_stream, device.index)

    @property
    def registered_bytes(self) -> int:
        """Bytes of memory on GPUs that NCCL's communicators have registered."""
        return sum(queue.registered_bytes for queue in self._gpus.values())

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of registered memory in symmetric windows."""
        return sum(queue.symmetric_bytes for queue in self._gpus.values())

    def check_gpus(self) -> None:
        """Raise CommError if an operation on a GPU has failed meanwhile."""
        for queue in self._gpus.values():
            queue.check()

    # Errors, and the end.

    def refuse(self, reason: str) -> None:
        """Stand in for an operation that only the other ranks can call; they get a ValueError."""
        text = reason.encode("utf-8", "replace").decode()  # a lone surrogate cannot be encoded in UTF-8
        # Enqueued, as earlier operations may still be in progress.
        self.run("refuse", False, text)

    def refuse_and_raise(self, error: Exception) -> NoReturn:
        """Refuse an operation that the other ranks call, then raise ``error``."""
        self.refuse(str(error))
        raise error

    def abandon(self, reason: str, *, in_step: bool) -> None:
        """Close, and send the ``reason`` to waiting ranks if possible. Returns at once.

        Args:
            reason: error on this rank.
            in_step: whether the other ranks compare their next operation. Inside :meth:`skip_checks` they would take
                the refusal for data.
        """

        self.farewell = lambda: reason  # in case a finalizer closes it first

        def leave() -> None:
            if in_step and not self.transport.interruptible and not self._gpus:  # closing would not send the reason
                with contextlib.suppress(Exception):  # they may already have left
                    self.refuse(reason)
            self.close(reason)

        try:
            self.worker.submit(leave)
        except RuntimeError:  # no thread can be started
            leave()

    def close(self, reason: str | None = None) -> None:
        """Release the transport, the thread and the queues. Idempotent; does nothing in a forked child.

        Args:
            reason: explanation for peers that still wait for this rank.
        """
        if self._pid != os.getpid() or not self._once.acquire(blocking=False):
            return
        late_ranks.forget(self.recorder)
        if not self.worker.is_current():
            self.let_end()
        patience = _PATIENCE if reason is None else _PATIENCE_AFTER_FAILURE
        for companion in self.companions:
            companion.close(reason)
        if not self.worker.unfinished or not self.transport.interruptible:
            self.worker.stop(min(patience, threads.EXIT_PATIENCE) if threads.is_exiting() else patience)
        for queue in self._gpus.values():
            queue.close()
        self._gpus.clear()
        self.transport.hand_over(patience)
        fatal = threads.fatal_error()
        self.transport.close((reason or self.farewell()) + (f": {fatal}" if fatal else ""))
        if self.transport.interruptible:
            self.worker.stop(patience)


class _Unchecked:
    """Block at whose end ranks compare operations again."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._transport.skip_checks = False


def _farewell() -> str:
    return "it closed its communicator"


def _refusal(rank: int, why: str) -> CommError:
    return CommError.during("submit", why, rank=rank)
