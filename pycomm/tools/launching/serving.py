"""A rank's side of a pool: it runs calls, answers them, and sends messages meanwhile. Errors of failed ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pycomm.tools.launching.processes import Pipe, finish, leave
from pycomm.tools.launching.serialize import deserialize, serialize

UNGUARDED = 213
"""Exit code of a rank whose script calls ``launch`` while the rank imports it."""
UNKNOWN = 1000
"""Stands for the exit code of an ended rank that is not a child process of the driver."""

_NOT_GUARDED = """the script calls pycomm.launch where it is imported, and every rank imports it to find the function.
Put the call under a guard, so that only the script itself runs it:

    if __name__ == "__main__":
        pycomm.launch(...)"""


class RankError(RuntimeError):
    """Failure of a rank; the message says which rank failed first, and how.

    Attributes:
        rank: the rank that failed first; ``None`` if it was not a single one.
        traceback: of its exception, as text; empty if it ended without one.
        signal: signal that killed it, or ``None``.
    """

    def __init__(
        self, message: str, rank: int | None = None, traceback: str = "", signal: signal.Signals | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.signal = signal


@dataclass(frozen=True)
class Failure:
    """Exception of a rank. Failures that it causes on other ranks have later times.

    Attributes:
        when: seconds of ``time.monotonic()``, which all processes of a host share.
        exception: the pickled exception; empty if it cannot be pickled.
    """

    rank: int
    when: float
    traceback: str
    exception: bytes = b""


def explain(
    exitcodes: Sequence[int | None], failures: Sequence[Failure], stderr_ends: Mapping[int, str] | None = None
) -> RankError:
    """Return the error of the rank that failed first: one that ended without an exception, else the earliest failure.

    Args:
        exitcodes: by rank; ``None`` for ranks that are alive or ended as expected.
        failures: exceptions of ranks.
        stderr_ends: end of the ranks' standard error.
    """
    unguarded = [rank for rank, code in enumerate(exitcodes) if code == UNGUARDED]
    if unguarded:
        return RankError(f"rank {unguarded[0]} did not start: {_NOT_GUARDED}", unguarded[0])
    reported = {failure.rank for failure in failures}
    silent = {rank: code for rank, code in enumerate(exitcodes) if code is not None and rank not in reported}
    lines = [f"rank {rank} {_ending(code)}{_quoted((stderr_ends or {}).get(rank))}" for rank, code in silent.items()]
    first = min(failures, key=lambda failure: failure.when, default=None)
    if first is not None:
        lines.append(f"rank {first.rank} failed{' after that' if lines else ''}:\n\n{first.traceback.rstrip()}")
    message = "\n".join(lines)
    if not silent:
        return RankError(message, first.rank, first.traceback) if first is not None else RankError(message)
    rank, code = next(iter(silent.items()))
    return RankError(message, rank, signal=signal.Signals(-code) if code < 0 else None)


def _ending(exitcode: int) -> str:
    if exitcode == UNKNOWN:
        return "died"
    if exitcode >= 0:
        return f"ended with exit code {exitcode}" + ("" if exitcode else ", and without a result")
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _quoted(words: str | None) -> str:
    return f"; the end of its standard error:\n\n{words.rstrip()}\n" if words else ""


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
