"""Works of the backend's operations: torch's ``Work``, each of whose methods raises the operation's error.

No failed future is handed out: torch loses its error (in a work made from a future) or dereferences its missing value
(in DistributedDataParallel). So a future always has a value, followed by a function that raises.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from pycomm import threads
from pycomm.collectives.transport.base import Receipt
from pycomm.errors import CommError
from pycomm.torch_internals import TorchWork, compiles_autograd, current_graph_task, queue_final_callback

Result = Sequence[Any] | Callable[[], Sequence[Any]]


class Pending(Protocol):
    """Operation in progress, as a :class:`BackendWork` sees it: a :class:`pycomm.worker.Work`, say."""

    def ends_within(self, seconds: float | None) -> bool:
        """Wait for its end, for at most ``seconds`` if that is a number; return whether it has ended."""

    def wait(self) -> object:
        """Raise its error if it has failed; it has ended."""

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once it has ended."""


class BackendWork(TorchWork):
    """Work of one operation.

    Args:
        pending: the operation; ``None`` if it has already ended well.
        result: tensors that the operation writes, or a function that returns them once they are asked for.
        name: name of the operation, for the error of :meth:`wait`.
        rank: rank of this process, likewise.
    """

    def __init__(self, pending: Pending | None, result: Result, name: str, rank: int) -> None:
        super().__init__()
        self._pending, self._result = pending, result
        self._name, self._rank = name, rank
        self._future: Any = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return ``True`` once the operation has ended; raise its error if it failed.

        Raises:
            CommError: ``timeout`` has passed; or the operation's own error.
        """
        if self._pending is None:
            return True
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        start = time.monotonic()
        if not self._pending.ends_within(seconds if seconds > 0 else None):
            waited = time.monotonic() - start
            what = f"Operation timed out: it had not ended after {waited:.2f} s"
            raise CommError.during(self._name, what, rank=self._rank, elapsed=waited)
        self._pending.wait()
        return True

    def synchronize(self) -> None:
        """Wait for the operation, as :meth:`wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or not."""
        return self._pending is None or self._pending.ends_within(0.0)

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error with which the operation has ended, if it has."""
        if self._pending is None or not self._pending.ends_within(0.0):
            return None
        try:
            self._pending.wait()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Any]:
        """Return the tensors that the operation has written."""
        self.wait()
        return self._outcome()

    def _outcome(self) -> list[Any]:
        return list(self._result() if callable(self._result) else self._result)

    def get_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the tensors that the operation writes, or of its error."""
        with self._lock:
            if self._future is None:
                self._future = self._make_future()
            return self._future

    def _make_future(self) -> Any:
        pending, outcome = self._pending, self._outcome

        def value_of(_: Any) -> list[Any]:
            if pending is not None:
                pending.wait()
            return outcome()

        ended: Any = torch.futures.Future()
        future = ended.then(value_of)
        is_half = self._name == "all_reduce" and any(x.dtype is torch.float16 for x in outcome())
        if is_half and current_graph_task() >= 0:  # perhaps for DistributedDataParallel's FP16_COMPRESS
            future = _typed().after(future, outcome())
        if pending is None:
            ended.set_result(None)
        else:
            pending.when_done(lambda: ended.set_result(None))
        return future


@functools.cache
def _typed() -> Any:
    """Return functions of TorchScript: ``after`` makes a future whose value C++ knows to be a list of tensors.

    Futures of Python have any object, which hooks in C++ refuse. No thread waits here.
    """
    return torch.jit.CompilationUnit("""
def value(ended: Future[List[Tensor]], result: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(ended)
    return result

def after(ended: Future[List[Tensor]], result: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(value, ended, result)
""")


class Reception:
    """Message that has not arrived yet. Waiting for it receives it.

    Args:
        receipt: the transport's.
        timeout: limit of its wait, in seconds.
        arrived: called once, when the message has come.
    """

    def __init__(self, receipt: Receipt, timeout: float, arrived: Callable[[], None] | None) -> None:
        self._receipt: Receipt | None = receipt
        self._timeout, self._arrived = timeout, arrived
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self.source = -1

    def ends_within(self, seconds: float | None) -> bool:
        """See :class:`Pending`."""
        if seconds == 0.0 and self._receipt is not None and not self._receipt.is_completed():
            return False
        with self._lock:
            if self._receipt is None:
                return True
            limit = self._timeout if seconds is None else min(seconds, self._timeout)
            start = time.monotonic()
            try:
                self.source = self._receipt.wait(limit)
                if self._arrived is not None:
                    self._arrived()
            except Exception as error:
                if limit < self._timeout and time.monotonic() - start >= limit and not self._receipt.is_completed():
                    return False  # only the caller's limit has passed
                self._error = error
            self._receipt = None
        return True

    def wait(self) -> None:
        """See :class:`Pending`."""
        if self._error is not None:
            raise self._error

    def when_done(self, callback: Callable[[], None]) -> None:
        """See :class:`Pending`."""

        def receive() -> None:
            self.ends_within(None)
            callback()

        threads.start(receive, "pycomm-receive")


class MessageWork(BackendWork):
    """Work of a receive, which knows where the message came from."""

    def __init__(self, reception: Reception, result: Sequence[Any], rank: int) -> None:
        super().__init__(reception, result, "recv", rank)
        self._reception = reception

    def source_rank(self) -> int:
        """Return the rank in the group from which the message came, once it has come."""
        return self._reception.source

    _source_rank = source_rank


class BackwardErrors:
    """Raiser of the errors of operations that were started inside ``backward()``, with their own types.

    DistributedDataParallel waits for its buckets' futures at the end of ``backward()``, and what a future raises is a
    plain ``RuntimeError`` that quotes the error. A callback of autograd that comes before DistributedDataParallel's
    waits for the same operations, and raises the error itself.
    """

    def __init__(self) -> None:
        self._pass = -1
        self._works: list[BackendWork] = []

    def watch(self, work: BackendWork) -> None:
        """Let ``backward()`` raise the error of ``work``, if it is running on this thread."""
        current = current_graph_task()
        if current < 0 or compiles_autograd():
            return
        if current != self._pass:
            works: list[BackendWork] = []
            self._pass, self._works = current, works
            queue_final_callback(lambda: _wait_for_all(works))
        self._works.append(work)


def _wait_for_all(works: list[BackendWork]) -> None:
    try:
        for work in works:
            work.wait()
    finally:
        works.clear()
