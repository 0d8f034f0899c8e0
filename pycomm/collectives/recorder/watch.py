"""Recording of a transport's operations as they are called."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pycomm._native as _native
from pycomm.collectives.recorder.ring import DIRECTORY, Recorder, array_of, told_with
from pycomm.errors import CommError

_DIFFERS = re.compile(r"the ranks disagree: rank \d+ called ")
"""Text that identifies a ValueError of all ranks that they disagree: shared memory raises all ValueErrors in C++."""

# Index of the argument with this rank's input (-1: none), and the range of arguments to record.
_COLLECTIVES = {
    "all_reduce": (0, 1, 2),
    "all_reduce_apart": (0, 1, 2),
    "reduce_scatter": (1, 2, 3),
    "all_gather": (1, 0, 0),
    "all_to_all": (1, 0, 0),
    "reduce": (0, 1, 3),
    "all_to_all_v": (1, 0, 0),
    "reduce_scatter_v": (1, 2, 3),
    "reduce_scatter_apart": (1, 2, 3),
    "reduce_on_host": (0, 0, 0),
    "all_gather_v": (1, 0, 0),
    "broadcast": (0, 1, 2),
    "barrier": (-1, 0, 0),
    "refuse": (-1, 0, 1),
    "run_program": (1, 2, 3),
}
_MESSAGES = {"send": (0, 1, 3), "receive": (0, 1, 3), "recv": (0, 1, 2)}
_CALLED = {"all_reduce_apart": "all_reduce", "reduce_scatter_apart": "reduce_scatter_v", "recv": "receive"}


def watch(transport: Any, group: str, ranks: Sequence[int]) -> Recorder:
    """Record the operations of ``transport`` from now on; return the recorder.

    Replaces the object's operations by recording ones. Operations that one transport runs by another are recorded once.

    Args:
        transport: has ``rank`` and operations with the arguments of ``transport.base.Transport``, which
            are called by position.
        group, ranks: see :class:`Recorder`.
    """
    recorder = Recorder(group, transport.rank, ranks)
    failed = functools.partial(_failed, weakref.ref(transport), _unbound(transport, "all_gather"))
    for name, places in (_COLLECTIVES | _MESSAGES).items():
        call = _unbound(transport, name)
        if call is None:
            continue
        watched = _native.watch_operation(
            recorder.ring, _CALLED.get(name, name), call, *places, name in _COLLECTIVES, array_of, failed
        )
        setattr(transport, name, functools.partial(_receive, watched, failed) if name == "receive" else watched)
    if (check := getattr(transport, "check", None)) is not None:  # which tells of operations that were only enqueued
        transport.check = functools.partial(_check, check, failed)
    return recorder


def _unbound(transport: Any, name: str) -> Callable[..., Any] | None:
    """Return an operation of ``transport``, ``None`` without one; it refers to the object weakly, to avoid a cycle."""
    method: Any = getattr(transport, name, None)
    if getattr(method, "__self__", None) is not transport:
        return method  # type: ignore[no-any-return]
    function, owner = method.__func__, weakref.ref(transport)
    return lambda *args: function(owner(), *args)


def _failed(reference: weakref.ref[Any], all_gather: Callable[..., None] | None, error: BaseException) -> None:
    transport = reference()
    differs = isinstance(error, ValueError) and _DIFFERS.match(str(error)) is not None
    if transport is None or not (differs or isinstance(error, CommError)):
        return
    from pycomm.collectives.recorder.calls import add_call, add_calls
    from pycomm.collectives.recorder.dump import dump_failure

    if isinstance(error, CommError):
        add_call(error)
    elif all_gather is not None:
        add_calls(error, transport, all_gather)  # also of ranks that expect it, as the others do so
    if not (told := told_with(error)) or "" in told:  # else they knew that they may differ
        dump_failure(transport.recorder, str(error))


def dump_on_signal() -> None:
    """Make SIGUSR2 write the file, unless the program handles SIGUSR2 itself."""
    if os.environ.get(DIRECTORY) == "" or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR2, _on_signal)


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    from pycomm.collectives.recorder.dump import dump_for_signal

    dump_for_signal()


def _check(check: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
    try:
        check()
    except CommError as error:
        failed(error)
        raise


def _receive(post: Callable[..., Any], failed: Callable[[BaseException], None], *args: Any) -> _Receipt:
    return _Receipt(post(*args), failed)


class _Receipt:
    """Posted receive whose failure is recorded. See :class:`pycomm.collectives.transport.base.Receipt`."""

    __slots__ = ("_failed", "_receipt", "cancel", "is_completed")

    def __init__(self, receipt: Any, failed: Callable[[BaseException], None]) -> None:
        self._receipt, self._failed = receipt, failed
        self.is_completed, self.cancel = receipt.is_completed, receipt.cancel

    def wait(self, timeout: float) -> int:
        try:
            source: int = self._receipt.wait(timeout)
        except CommError as error:
            self._failed(error)
            raise
        return source
