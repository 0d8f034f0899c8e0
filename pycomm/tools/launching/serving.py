"""The side of a rank in a pool: it does what it is called for, answers, and sends messages meanwhile."""

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
"""Lets a rank write where its threads are."""

_driver: Pipe | None = None  # the pipe to it, in a rank
_sending = threading.Lock()


@dataclass(frozen=True)
class RankCall:
    """What a rank is to do: a function with its arguments, serialized. ``None`` in its place: to finish.

    Attributes:
        leaves: whether the rank ends at once if that fails, by which its peers notice.
    """

    rank: int
    function: bytes
    leaves: bool = False


@dataclass(frozen=True)
class Returned:
    """Answer of a rank whose function has returned."""

    result: bytes


def send(message: Any) -> None:
    """Send ``message`` to the process that has called this function on its ranks. From any thread."""
    assert _driver is not None, "this process is no rank of a pool"
    with _sending:
        _driver.send(message)


def serve(pipe: Pipe) -> bool:
    """Do what comes through ``pipe``; return True if asked to finish, False once nobody is there to ask."""
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
        with contextlib.suppress(OSError):  # nobody listens any more
            send(answer)
        if call.leaves and isinstance(answer, Failure):
            leave(1)


def _answer(call: RankCall) -> Returned | Failure:
    try:
        function, arguments = deserialize(call.function)
        try:
            result = function(*arguments)
        except SystemExit as error:
            if error.code not in (None, 0):  # these are a script's way to say that it is done
                raise
            result = None
        return Returned(serialize(f"the result of rank {call.rank}, a {type(result).__name__},", result))
    except BaseException as error:
        return _failure(call.rank, error)


def serve_and_end(rank: int, pipe: Pipe) -> None:
    """Be a rank of this host: serve, then end the process, as a program does if asked to finish, else at once."""
    faulthandler.register(WHERE)
    if serve(pipe):
        try:
            finish()  # with the group, which threads and handlers may use as all ranks are here
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
    """Return the traceback from what was called on, if the error is the function's."""
    trace = error.__traceback__
    inner = trace
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner or trace))


def _as_bytes(error: BaseException) -> bytes:
    """Return the serialized exception; nothing if it cannot be serialized, or not be made again of that."""
    try:
        serialized = serialize("the exception", error)
        deserialize(serialized)
    except Exception:
        return b""
    return serialized
