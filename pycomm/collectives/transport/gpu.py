"""Communication on one GPU: a stream of its own, NCCL on it, and its order relative to all other streams.

Nothing here blocks the host. An operation starts after all work submitted so far to the streams of its arrays, the
producers; work submitted to them later starts after the operation.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

import pycomm._native as _native
from pycomm.collectives.transport.gpu_program import GpuProgram, all_to_all
from pycomm.collectives.transport.nccl import NcclTransport
from pycomm.collectives.transport.registered import reclaim, register
from pycomm.kernels import Scratch
from pycomm.schedule.program import Program
from pycomm.schedule.table import Table
from pycomm.torch_internals import raw_stream

_NUM_ARRAYS = {"reduce_scatter": 2, "all_gather": 2}
"""Number of leading arguments that are arrays, if not one."""


def streams_of(arrays: Sequence[Any]) -> list[int]:
    """Return the current streams of the libraries of ``arrays``, as integers, each once."""
    return list({_stream_of(array) for array in arrays})


def _stream_of(array: Any) -> int:
    if isinstance(array, torch.Tensor):
        return raw_stream(array.get_device())
    stream = array.__cuda_array_interface__.get("stream")
    return 0 if stream in (None, 1) else int(stream)  # 1 names the legacy default stream


class GpuWork:
    """Operation in progress on a GPU.

    Args:
        queue: queue that it is in.
        moment: its end on the communication stream.
        producers: streams that wait for it in :meth:`wait`.
        result: what :meth:`wait` returns.
        kept: objects whose memory the operation uses; cleared once that memory can be reused safely.
    """

    def __init__(self, queue: GpuQueue, moment: Any, producers: Collection[int], result: Any, kept: list[Any]) -> None:
        self._queue = queue
        self._moment = moment
        self._producers = producers
        self._result = result
        self.kept = kept

    def is_completed(self) -> bool:
        """Return whether the GPU has finished the operation.

        Raises:
            RuntimeError: the operation has been captured into a CUDA graph.
        """
        if self._moment.is_captured:
            raise RuntimeError(
                "is_completed: the operation was captured into a CUDA graph, and runs whenever that is launched: "
                "call wait() in the capture"
            )
        passed: bool = self._moment.has_passed()
        return passed

    def wait(self) -> Any:
        """Make the producers' streams and torch's current one wait for the operation; return its result.

        Does not block the host.

        Raises:
            CommError: NCCL has failed since.
        """
        self._queue.check()
        self.ends_within(None)
        return self._result

    def ends_within(self, seconds: float | None) -> bool:
        """Make these streams wait even if NCCL has failed. Returns true at once: counterpart of the ``Work``'s."""
        for stream in {*self._producers, *self._queue.torch_streams()}:
            self._moment.hold_back(stream)
        self.kept.clear()  # those streams reuse the memory after the operation only
        return True


class GpuQueue:
    """Queue of operations on one GPU, on a communication stream: counterpart of the ``Channel``.

    Args:
        device: ordinal of the GPU.
        timeout: limit of every operation, in seconds.
        make_transport: returns NCCL's communicator for a device, an algorithm and the streams of its first operation;
            collective.
    """

    native = ("auto", "native", "ring")
    """Names of algorithms that are NCCL's own."""

    def __init__(
        self, device: int, timeout: float, make_transport: Callable[[int, str, Sequence[int]], NcclTransport]
    ) -> None:
        self.device, self._timeout = device, timeout
        self._make_transport = make_transport
        self._transports: dict[str, NcclTransport] = {}
        self.scratch = Scratch()  # for kernels on the communication stream
        self._own_stream: Any = None
        self._marks: Any = None  # stream without work, whose events order other streams
        self._for_torch: dict[int, Any] = {}  # streams of pycomm as torch's, by handle
        self._has_torch = torch.cuda.is_available()  # else arrays are from other libraries
        self._kept: deque[tuple[Any, list[Any]]] = deque()  # objects used by operations that were not waited for
        self._grouped: list[Sequence[Any]] | None = None  # arrays of an open group's operations

    def transport(self, algorithm: str = "native", producers: Collection[int] = ()) -> NcclTransport:
        """Return NCCL's communicator for ``algorithm``. The first call makes it, and is collective.

        Raises:
            RuntimeError: on every rank, in the first call: some rank captures a stream of ``producers``, or torch's
                current one, into a CUDA graph.
        """
        if algorithm not in self._transports:
            streams = [*producers, *self.torch_streams()]
            self._transports[algorithm] = self._make_transport(self.device, algorithm, streams)
        return self._transports[algorithm]

    def require_no_capture(self, producers: Collection[int], what: str, why: str) -> None:
        """Raise RuntimeError if a CUDA graph captures a stream of ``producers`` or torch's current one."""
        _native.require_no_capture(self.device, [*producers, *self.torch_streams()], what, why)

    @property
    def _stream(self) -> Any:
        """Communication stream; made after NCCL's communicator, so that all ranks raise if one lacks NCCL."""
        if self._own_stream is None:
            self.transport()
            self._own_stream = _native.CommStream(self.device)
        return self._own_stream

    def _torch_stream(self, stream: Any) -> Any:
        """Return a stream of pycomm as one of torch's."""
        if stream.handle not in self._for_torch:
            made = torch.cuda.ExternalStream(stream.handle, self.device)  # type: ignore[no-untyped-call]
            self._for_torch[stream.handle] = made
        return self._for_torch[stream.handle]

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """Make the communication stream torch's current one.

        Memory allocated inside is reused on that stream only, so it may be freed at any time.
        """
        if not self._has_torch:
            yield
            return
        with torch.cuda.stream(self._torch_stream(self._stream)):
            yield

    @contextlib.contextmanager
    def reading(self, producers: Collection[int]) -> Iterator[None]:
        """Read, on torch's current stream, what the streams ``producers`` have written; they may then reuse it."""
        here = raw_stream(self.device)
        others = [stream for stream in producers if stream != here]
        self._order(others, [here])
        yield
        self._order([here], others)

    def _order(self, first: Sequence[int], then: Sequence[int]) -> None:
        """Make the streams ``then`` wait for all work that was enqueued on the streams ``first``."""
        if not (first and then):
            return
        if self._marks is None:
            self._marks = _native.CommStream(self.device)
        for stream in first:
            self._marks.follow(stream)
        moment = self._marks.now()
        for stream in then:
            moment.hold_back(stream)

    def torch_streams(self) -> list[int]:
        """Return a list with torch's current stream; empty if torch has no CUDA."""
        return [raw_stream(self.device)] if self._has_torch else []

    def all_reduce(self, x: Any, op: str, async_op: bool, algorithm: str | Table) -> GpuWork | None:
        """Reduce ``x`` over all ranks by NCCL's choice of algorithm, or by its "ring"."""
        return self._run("ring" if algorithm == "ring" else "native", "all_reduce", async_op, x, op)

    def run(self, operation: str, async_op: bool, *args: Any) -> GpuWork | None:
        """Enqueue NCCL's operation of that name."""
        if operation == "all_to_all":
            return self._all_to_all(async_op, *args)
        return self._run("native", operation, async_op, *args)

    def reduce_scatter_v(self, xs: Sequence[torch.Tensor], op: str) -> None:
        """Reduce every ``xs[p]`` over all ranks, in place, on rank p only. Parts may differ in length from each other.

        NCCL has no such operation; each part is reduced to its rank, all in one group.
        """
        with self.grouped():
            for dst, x in enumerate(xs):
                self.run("reduce", False, x, dst, op)

    def all_gather_v(self, outs: Sequence[torch.Tensor]) -> None:
        """Overwrite every ``outs[p]`` with the one on rank p. Parts may differ in length from each other."""
        with self.grouped():
            for src, out in enumerate(outs):
                self.run("broadcast", False, out, src)

    def _run(self, algorithm: str, operation: str, async_op: bool, *args: Any) -> GpuWork | None:
        arrays = args[: _NUM_ARRAYS.get(operation, 1)]
        transport = self.transport(algorithm, streams_of(arrays))
        for array in arrays:
            register(array, transport)
        call = getattr(transport, operation)
        return self._enqueue(arrays, lambda stream: call(*args, stream, self._timeout), async_op)

    def _all_to_all(self, async_op: bool, out: Any, x: Any) -> GpuWork | None:
        if self._grouped is not None:
            raise ValueError("all_to_all inside a group, wanted sends and receives: it is a group of its own")
        transport = self.transport("native", streams_of([out, x]))
        for array in (out, x):
            register(array, transport)
        return self._enqueue([out, x], lambda stream: all_to_all(transport, out, x, stream, self._timeout), async_op)

    def run_program(self, program: Program, x: Any, op: str, async_op: bool) -> GpuWork | None:
        """All-reduce ``x`` by this rank's program. Raises ValueError inside a group; else as :class:`GpuProgram`."""
        if self._grouped is not None:
            text = "a schedule inside a group, wanted its rounds to be groups of their own: end the group first"
            raise ValueError(text)
        producers = streams_of([x])
        transport, run = self.transport("native", producers), GpuProgram(program, x, op, self.scratch)
        if run.needs_memory and not isinstance(x, torch.Tensor):
            why = "memory of x's library would be freed before the graph is launched, wanted a torch tensor"
            self.require_no_capture(producers, "a schedule", why)

        def enqueue(stream: int) -> None:
            with self.as_current():
                run.run(transport, stream, self._timeout)

        return self._enqueue([x], enqueue, async_op, [run])

    def send(self, x: Any, dst: int, tag: int) -> None:
        """Send ``x`` to rank ``dst``; there are no tags."""
        _require_no_tag(tag)
        self.run("send", False, x, dst)

    def recv(self, x: Any, src: int | None, tag: int) -> None:
        """Receive ``x`` from rank ``src``."""
        _require_no_tag(tag)
        if src is None:
            raise ValueError("src is None, wanted a rank: on a GPU only messages of a given rank can be received")
        self.run("recv", False, x, src)

    def _enqueue(
        self, arrays: Sequence[Any], operation: Callable[[int], None], async_op: bool, kept: Sequence[Any] = ()
    ) -> GpuWork | None:
        """Call ``operation(stream)``, ordered relative to the work on the streams of ``arrays``.

        With ``async_op``, which is a ValueError inside a group, ``wait()`` of the result makes those streams wait.
        ``kept`` are other objects that must live until the operation has finished.
        """
        producers = streams_of(arrays)
        self._drop_finished()
        if self._grouped is not None and async_op:
            raise ValueError("async_op=True inside a group, wanted False: the group's operations start when it ends")
        for stream in producers:
            self._stream.follow(stream)
        operation(self._stream.handle)
        if self._grouped is not None:
            self._grouped.append(arrays)  # also keeps them alive until NCCL gets the operation
            return None
        moment = self._stream.now()
        if not async_op:
            for stream in producers:
                moment.hold_back(stream)
            return None
        work = GpuWork(self, moment, producers, None, [*arrays, *kept])
        if not moment.is_captured:
            self._kept.append((moment, work.kept))  # in case the work is dropped
        return work

    def call(self, job: Callable[[], Any]) -> GpuWork:
        """Call ``job`` with the communication stream as torch's current one, ordered after the one that is now."""
        self._stream.follow(raw_stream(self.device))
        self._drop_finished()
        with self.as_current():
            result = job()
        return GpuWork(self, self._stream.now(), (), result, [])

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """Group operations as :meth:`NcclTransport.grouped` does; all arrays' streams wait for the whole group."""
        if self._grouped is not None:
            raise RuntimeError("a group is already open on this GPU; groups do not nest")
        transport, self._grouped = self.transport(), []
        try:
            with transport.grouped(self._timeout):
                yield
            moment = self._stream.now()
            for stream in streams_of([array for arrays in self._grouped for array in arrays]):
                moment.hold_back(stream)
        finally:
            self._grouped = None

    @property
    def registered_bytes(self) -> int:
        """Bytes of memory that NCCL's communicators have registered."""
        return sum(transport.registered_bytes for transport in self._transports.values())

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of registered memory in symmetric windows."""
        return sum(transport.windows.num_bytes for transport in self._transports.values())

    def check(self) -> None:
        """Raise the errors that NCCL's watchdogs have found."""
        for transport in self._transports.values():
            transport.check()

    def close(self) -> None:
        """Release NCCL's communicators and the stream. Not collective."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        if self._own_stream is not None:
            with contextlib.suppress(RuntimeError):  # the GPU may be lost
                # Work on our stream may still write to memory that the caller is about to free.
                moment = self._own_stream.now()
                for stream in self.torch_streams():
                    moment.hold_back(stream)
        self._kept.clear()
        with contextlib.suppress(RuntimeError):
            reclaim()

    def _drop_finished(self) -> None:
        while self._kept and (not self._kept[0][1] or self._kept[0][0].has_passed()):
            self._kept.popleft()[1].clear()


def _require_no_tag(tag: int) -> None:
    if tag != 0:
        raise ValueError(f"tag is {tag!r}, wanted 0: messages between GPUs have no tags")
