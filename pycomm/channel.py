"""Channel of a process group: its transport, the communication thread, and the queues of its GPUs.

:class:`pycomm.Communicator` is the public face; what only pycomm's own parts need is here.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from pycomm.errors import CommError
from pycomm.execute.gpu_program import run_on_gpu
from pycomm.execute.runner import runner_for
from pycomm.schedule.program import Program
from pycomm.transport.base import Transport, bytes_of
from pycomm.transport.gpu import GpuQueue, GpuWork, current_stream
from pycomm.transport.nccl import NcclTransport
from pycomm.worker import Work, Worker


class Channel:
    """Order in which operations reach the transport, or a GPU's stream.

    Knows nothing of the communicator in front of it, which is closed when it is dropped.

    Args:
        transport: of arrays in CPU memory; owned from now on.
        timeout: for every single wait, in seconds.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport, self.timeout = transport, timeout
        self.rank, self.size = transport.rank, transport.size
        self.worker = Worker(f"pycomm-{self.rank}", functools.partial(_refusal, self.rank))
        self._runner = runner_for(transport)
        self._gpus: dict[int, GpuQueue] = {}
        self._pid = os.getpid()
        self._once = threading.Lock()  # taken by who closes first, on whichever thread

    # Arrays in CPU memory.

    def enqueue(self, job: Callable[[], None], async_op: bool = False) -> Work | None:
        """Run ``job`` after what was called before; at once and here if nothing is under way."""
        if async_op:
            try:
                return self.worker.submit(job)
            except RuntimeError as error:  # no thread can be started, so there is nothing under way
                self.refuse_and_raise(RuntimeError(f"no thread could be started for an async operation: {error}"))
        if self.worker.idle() or self.worker.is_current():
            job()
        else:
            self.worker.submit(job).wait()
        return None

    def submit(self, job: Callable[[], Any]) -> Work:
        """Run ``job`` on the communication thread, after what was submitted before.

        The thread on which ``async_op`` operations run: a job may call operations of the
        communicator, which then run at once.
        """
        return self.worker.submit(job)

    @contextlib.contextmanager
    def skip_checks(self) -> Iterator[None]:
        """Let operations inside, in a job of :meth:`submit`, go uncompared: they follow from compared ones.

        Over torch.distributed the comparison costs a message each. A disagreement would end at the timeout.
        """
        assert self.worker.is_current()
        self.transport.skip_checks = True
        try:
            yield
        finally:
            self.transport.skip_checks = False

    def run_program(self, program: Program, x: Any, op: str = "sum", async_op: bool = False) -> Work | None:
        """Run this rank's part of any table, a collective or not, on ``x`` in CPU memory."""
        return self.enqueue(lambda: self._runner.run(program, x, op, self.timeout), async_op)

    def all_gather_bytes(self, mine: bytes) -> list[bytes]:
        """Return every rank's ``mine``, in rank order; lengths may differ. For small messages."""
        try:
            content = bytes_of(mine, "mine")
        except Exception as error:  # whatever a strange object comes to
            self.refuse_and_raise(error)
        lengths = np.empty(self.size, np.int64)
        self._all_gather(lengths, np.array([len(content)], np.int64))
        longest = int(lengths.max())
        padded = np.zeros(longest, np.uint8)
        padded[: len(content)] = content
        everyone = np.empty(self.size * longest, np.uint8)
        self._all_gather(everyone, padded)
        rows = everyone.reshape(self.size, longest)
        return [rows[p, : lengths[p]].tobytes() for p in range(self.size)]

    def _all_gather(self, out: Any, x: Any) -> None:
        self.enqueue(lambda: self.transport.all_gather(out, x, self.timeout))

    # Arrays on GPUs.

    def gpu(self, device: int) -> GpuQueue:
        """Return the queue of the GPU with the ordinal ``device``, made when it is first asked for."""
        if device not in self._gpus:
            self._gpus[device] = GpuQueue(device, self._make_nccl)
        return self._gpus[device]

    def _make_nccl(self, device: int, algorithm: str) -> NcclTransport:
        return NcclTransport(self.rank, self.size, device, self.all_gather_bytes, algorithm, self.timeout)

    def on_gpu(
        self,
        device: int,
        arrays: Sequence[Any],
        operation: Callable[[NcclTransport, int, float], None],
        async_op: bool = False,
        algorithm: str = "native",
    ) -> GpuWork | None:
        """Enqueue ``operation(transport, stream, timeout)``, which works on ``arrays``, on the GPU ``device``."""
        queue = self.gpu(device)
        transport = queue.transport(algorithm)
        return queue.enqueue(arrays, lambda stream: operation(transport, stream, self.timeout), async_op)

    def run_on_gpu(self, device: int, program: Program, x: Any, op: str, async_op: bool) -> GpuWork | None:
        """As :meth:`run_program`, for ``x`` on the GPU ``device``."""
        return run_on_gpu(self.gpu(device), program, x, op, self.timeout, async_op)

    def submit_on_gpu(
        self, device: torch.device, job: Callable[[], Any], reads: Sequence[torch.Tensor | None], producers: set[int]
    ) -> GpuWork:
        """Call ``job`` now, with the communication stream of ``device`` as torch's current stream.

        What the job launches starts after what the streams ``producers`` (``cudaStream_t`` as
        integers), and torch's current one, have been given so far. They, and the stream that is
        current then, are held back by ``wait()``. The tensors ``reads`` may be freed at once.
        """
        return self.gpu(device.index).run(job, reads, producers)

    @staticmethod
    def current_stream(device: torch.device) -> int:
        """Return torch's current stream as an integer, for :meth:`submit_on_gpu`."""
        return current_stream(device.index)

    def check_gpus(self) -> None:
        """Raise CommError for what went wrong on GPUs meanwhile."""
        for queue in self._gpus.values():
            queue.check()

    # Errors, and the end.

    def refuse(self, reason: str) -> None:
        """Stand in for an operation that the others call and this rank cannot; they get a ValueError."""
        text = reason.encode("utf-8", "replace").decode()  # half a surrogate pair has no UTF-8
        # After what was called before, which may still be under way.
        self.enqueue(lambda: self.transport.refuse(text, self.timeout))

    def refuse_and_raise(self, error: Exception) -> NoReturn:
        """Tell the other ranks that this one cannot take part, then raise ``error``."""
        self.refuse(str(error))
        raise error

    def abandon(self, reason: str, *, in_step: bool) -> None:
        """Close, and let those who wait for this rank know why, if they can. Returns at once.

        Args:
            in_step: whether the others' next operation is one that they compare first. Inside
                :meth:`skip_checks` they would take for data what is said to them.
        """

        def leave() -> None:
            if in_step and not self.transport.interruptible and not self._gpus:  # where closing tells nobody why
                with contextlib.suppress(Exception):  # they may have gone already
                    self.refuse(reason)
            self.close(reason)

        try:
            self.worker.submit(leave)
        except RuntimeError:  # no thread can be started
            leave()

    def close(self, reason: str | None = None) -> None:
        """Give back transport, thread and queues. Idempotent; a forked child owns none of them.

        Args:
            reason: what peers that still wait for this rank are told.
        """
        if self._pid != os.getpid() or not self._once.acquire(blocking=False):
            return
        if self.worker.idle() or not self.transport.interruptible:
            self.worker.stop(patience=5.0)
        for queue in self._gpus.values():
            queue.close()
        self._gpus.clear()
        self.transport.close(reason or "it closed its communicator")
        if self.transport.interruptible:
            self.worker.stop(patience=5.0)


def _refusal(rank: int, why: str) -> CommError:
    return CommError.during("submit", why, rank=rank)
