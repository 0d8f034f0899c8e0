"""Commands with a limit, whose output is shown as it comes, and which leave no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench import ROOT
from bench.harness.processes import kill_session

_LOOK_SECONDS = 0.5
_SILENCE_SECONDS = 30.0
_KEPT_OUTPUT = 6000  # characters of what a command that failed has said


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit status, whether it ended on its own, and its last output on both streams."""

    status: int
    in_time: bool
    output: str


def run_command(
    command: Sequence[str],
    seconds: float,
    variables: Mapping[str, str] | None = None,
    look: Callable[[], None] = lambda: None,
) -> Ended:
    """Run ``command``, for ``seconds`` at most, and show what it says; call ``look`` now and then, and at the end."""
    seconds = max(1.0, seconds)
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        echo = _Echo(output.fileno())
        try:
            in_time = _watch(process, seconds, echo, look)
        finally:
            status = _stop(process)
            echo.show()
            look()
    return Ended(status, in_time, echo.end() + ("" if in_time else f"\nstopped after {seconds:.0f} s"))


class _Echo:
    """Output of a command, printed as far as it has come."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._position, self._end = descriptor, 0, b""
        self._begin = self._last = time.monotonic()

    def show(self) -> None:
        """Print what is new, and during long silence how long it has taken so far."""
        now = time.monotonic()
        # pread: the command writes where this descriptor stands, too.
        while part := os.pread(self._descriptor, 1 << 16, self._position):
            self._position, self._last = self._position + len(part), now
            self._end = (self._end + part)[-_KEPT_OUTPUT:]
            print(part.decode(errors="replace"), end="", flush=True)
        if now - self._last > _SILENCE_SECONDS:
            self._last = now
            print(f"... {now - self._begin:.0f} s", flush=True)

    def end(self) -> str:
        return self._end.decode(errors="replace").rstrip()


def _watch(process: subprocess.Popen[bytes], seconds: float, echo: _Echo, look: Callable[[], None]) -> bool:
    """Wait until ``process`` ends; returns whether it did so in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK_SECONDS, max(0.01, deadline - time.monotonic())))
            return True
        echo.show()
        look()
    return False


def _stop(process: subprocess.Popen[bytes]) -> int:
    """End all that it has started in its session, at first as Ctrl-C does, on which pytest still sums up."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
    return kill_session(process)
