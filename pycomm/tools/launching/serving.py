"""A rank's side of a pool: it runs calls, answers them, and sends messages meanwhile."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pycomm.tools.launching.failures import Failure
from pycomm.tools.launching.processes import Pipe, finish, leave
from pycomm.tools.launching.serialize import deserialize, serialize

Send = Callable[[Any], None]

WHERE = signal.SIGUSR1
"""Signal at which a rank prints the stacks of its threads."""

_driver: Pipe | None = None  # in a rank, the pipe to the driver
_sending = threading.Lock()


@dataclass(frozen=True)
class RankCall:
    """Call for a rank: a function with its arguments, serialized. ``None`` instead of a call tells a rank to finish.

    Attributes:
        leaves: whether the rank ends at once if the call fails, so that its peers notice.
    """

    rank: int
    function: bytes
    leaves: bool = False


@dataclass(frozen=True)
class Returned:
    """Answer of a rank whose function has returned."""

    result: bytes


def send(message: Any) -> None:
    """Send ``message`` from a rank, on any thread, to the process that started the ranks."""
    assert _driver is not None, "this process is no rank of a pool"
    with _sending:
        _driver.send(message)


def serve(pipe: Pipe) -> bool:
    """Run the calls from ``pipe``; return True when asked to finish, False when the pipe ends."""
    global _driver
    _driver = pipe
    while True:
        try:
            call = pipe.recv()
        except (EOFError, OSError):
            return False
        if call is None:
            return True
        answer = _answer(call)
        with contextlib.suppress(OSError):  # the driver has ended
            send(answer)
        if call.leaves and isinstance(answer, Failure):
            leave(1)


def _answer(call: RankCall) -> Returned | Failure:
    try:
        function, arguments = deserialize(call.function)
        try:
            result = function(*arguments)
        except SystemExit as error:
            if error.code not in (None, 0):  # these mean success
                raise
            result = None
        return Returned(serialize(f"the result of rank {call.rank}, a {type(result).__name__},", result))
    except BaseException as error:
        return _failure(call.rank, error)


def serve_and_end(rank: int, pipe: Pipe) -> None:
    """Serve calls as a rank of this host, then end the process: as a program does if asked to finish, else at once."""
    faulthandler.register(WHERE)
    if serve(pipe):
        try:
            finish()  # before the group is destroyed: threads and exit handlers may use it
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException as error:
            with contextlib.suppress(OSError):
                send(_failure(rank, error))
            leave(1)
    leave(0)


def _failure(rank: int, error: BaseException) -> Failure:
    return Failure(rank, time.monotonic(), _as_text(error), _as_bytes(error))


def _as_text(error: BaseException) -> str:
    """Return the traceback without its outer lines in this package."""
    trace = error.__traceback__
    inner = trace
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner or trace))


def _as_bytes(error: BaseException) -> bytes:
    """Return the serialized exception; empty if it cannot be serialized and restored."""
    try:
        serialized = serialize("the exception", error)
        deserialize(serialized)
    except Exception:
        return b""
    return serialized
