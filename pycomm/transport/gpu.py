"""Communication on one GPU: a stream of its own, NCCL on it, and the order between it and everybody else's streams.

Nothing here waits on the host. An operation starts after what its arrays' producers have been given
so far, and what the producers are given afterwards starts after it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

import pycomm._native as _native
from pycomm.transport.nccl import NcclTransport


def gpu_of(array: Any) -> int | None:
    """The ordinal of the GPU that ``array`` is on; ``None`` for any other object."""
    if isinstance(array, torch.Tensor):
        return array.get_device() if array.is_cuda else None
    try:
        if not hasattr(array, "__cuda_array_interface__"):
            return None
        device = getattr(array, "device", 0)
        return int(getattr(device, "id", device))  # cupy's has an id
    except Exception:  # whatever a strange object comes to: it is refused where the others are told
        return None


def stream_of(array: Any) -> int:
    """The stream that ``array``'s library works on now, as an integer."""
    if isinstance(array, torch.Tensor):
        return current_stream(array.get_device())
    stream = array.__cuda_array_interface__.get("stream")
    return 0 if stream in (None, 1) else int(stream)  # 1 names the legacy default stream


def current_stream(device: int) -> int:
    """torch's, as an integer."""
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


class GpuWork:
    """Something under way on a GPU."""

    def __init__(self, queue: GpuQueue, moment: Any, producers: Collection[int], result: Any) -> None:
        self._queue = queue
        self._moment = moment
        self._producers = producers
        self._result = result

    def is_completed(self) -> bool:
        """Whether the GPU has come past it."""
        passed: bool = self._moment.has_passed()
        return passed

    def wait(self) -> Any:
        """Let the streams that wait for it start after it; does not block the host."""
        self._queue.check()
        for stream in {*self._producers, *self._queue.torch_streams()}:
            self._moment.hold_back(stream)
        return self._result


class GpuQueue:
    """One GPU's communication stream. Made when the first array of that GPU comes, by all ranks alike.

    Args:
        make_transport: makes NCCL's communicator for an algorithm; collective.
    """

    def __init__(self, device: int, make_transport: Callable[[int, str], NcclTransport]) -> None:
        self.device = device
        self._make_transport = make_transport
        self._transports: dict[str, NcclTransport] = {}
        self._own_stream: Any = None
        self._kept: deque[tuple[Any, Any]] = deque()
        self._grouped: list[Sequence[Any]] | None = None  # the arrays of an open group's operations

    def transport(self, algorithm: str = "native") -> NcclTransport:
        """NCCL's communicator, collectively made at first use."""
        if algorithm not in self._transports:
            self._transports[algorithm] = self._make_transport(self.device, algorithm)
        return self._transports[algorithm]

    @property
    def _stream(self) -> Any:
        """Made once NCCL is there: where it, or CUDA, is missing, the error is the one that all ranks share."""
        if self._own_stream is None:
            self.transport()
            self._own_stream = _native.CommStream(self.device)
        return self._own_stream

    def _torch_stream(self) -> torch.cuda.Stream:
        return torch.cuda.ExternalStream(self._stream.handle, self.device)  # type: ignore[no-untyped-call]

    def torch_streams(self) -> list[int]:
        """torch's current stream, where torch knows GPUs."""
        return [current_stream(self.device)] if torch.cuda.is_available() else []

    def enqueue(
        self, arrays: Sequence[Any], operation: Callable[[int], None], async_op: bool, kept: Sequence[Any] = ()
    ) -> GpuWork | None:
        """Let ``operation(stream)`` enqueue something that reads and writes ``arrays`` and needs ``kept`` meanwhile."""
        producers = list({stream_of(array) for array in arrays})
        self._drop_finished()
        if self._grouped is not None and async_op:
            raise ValueError("async_op=True inside a group, wanted False: the group's operations start when it ends")
        for stream in producers:
            self._stream.follow(stream)
        operation(self._stream.handle)
        if self._grouped is not None:
            self._grouped.append(arrays)  # also so that they live until NCCL is given the operation
            return None
        moment = self._stream.now()
        if not async_op:
            for stream in producers:
                moment.hold_back(stream)
            return None
        self._kept.append((moment, [*arrays, *kept]))  # nobody may reuse their memory before
        return GpuWork(self, moment, producers, None)

    def run(self, job: Callable[[], Any], reads: Sequence[torch.Tensor | None], producers: Collection[int]) -> GpuWork:
        """Call ``job`` with the communication stream as torch's current one, ordered after ``producers``."""
        ours = self._torch_stream()
        for stream in {*producers, current_stream(self.device)}:
            self._stream.follow(stream)
        with torch.cuda.stream(ours):
            result = job()
        for tensor in reads:
            if tensor is not None:
                tensor.record_stream(ours)  # its memory is not reused before our stream has come here
        return GpuWork(self, self._stream.now(), producers, result)

    @property
    def has_open_group(self) -> bool:
        """Whether :meth:`grouped` has begun, and not ended."""
        return self._grouped is not None

    @contextlib.contextmanager
    def grouped(self, timeout: float) -> Iterator[None]:
        """As :meth:`NcclTransport.grouped`; the producers of all arrays are held back by the group as a whole."""
        if self._grouped is not None:
            raise RuntimeError("a group is open already on this GPU; groups do not nest")
        transport, self._grouped = self.transport(), []
        try:
            with transport.grouped(timeout):
                yield
            moment = self._stream.now()
            for stream in {stream_of(array) for arrays in self._grouped for array in arrays}:
                moment.hold_back(stream)
        finally:
            self._grouped = None

    def check(self) -> None:
        """Raise what NCCL's watchdogs have found."""
        for transport in self._transports.values():
            transport.check()

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        if self._own_stream is not None:
            with contextlib.suppress(RuntimeError):  # a GPU that is lost holds nobody back
                # What is queued on our stream may still write to memory that the caller is about to free.
                moment = self._own_stream.now()
                for stream in self.torch_streams():
                    moment.hold_back(stream)
        self._kept.clear()

    def _drop_finished(self) -> None:
        while self._kept and self._kept[0][0].has_passed():
            self._kept.popleft()
