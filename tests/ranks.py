"""Ranks for tests: real processes that live as long as the test session and run functions on demand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pycomm.launching import LocalRanks, Pipe, join, rendezvous
from tests.fork_server import ForkedRanks

SLOWER = float(os.environ.get("PYCOMM_TEST_SLOWER", "1"))
"""How many times longer than usual ranks are waited for: on an emulated processor everything takes its time."""


@dataclass
class Outcome:
    """What a function came to on one rank."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, pipe: Pipe, size: int, port: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    join(port, rank, size)
    pipe.send(Outcome())
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)  # the parent is gone or done; a rank stuck in a thread must not keep this process
        try:
            outcome = Outcome(result=function(*args))
        except BaseException as error:
            outcome = Outcome(error=error, trace=traceback.format_exc())
        try:
            pipe.send(outcome)
        except Exception as error:  # does not pickle
            pipe.send(Outcome(error=RuntimeError(f"outcome cannot travel: {error}"), trace=outcome.trace))


class RankPool:
    """``size`` processes in one Gloo process group, started anew or, sooner, ``forked``."""

    def __init__(self, size: int, forked: bool = False) -> None:
        self.size = size
        self._meeting = contextlib.ExitStack()
        start = ForkedRanks if forked else LocalRanks
        self.port = self._meeting.enter_context(rendezvous())
        self._ranks = start(_serve, size, (size, self.port))
        self.pipes, self.processes = self._ranks.pipes, self._ranks.processes
        self._collect(60.0)

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Outcome]:
        """Run ``function(*args)`` on every rank; an argument that is a list as long as there are ranks, wrapped in
        ``PerRank``, is dealt out."""
        for rank, pipe in enumerate(self.pipes):
            dealt = [arg.values[rank] if isinstance(arg, PerRank) else arg for arg in args]
            pipe.send((function, dealt))
        return self._collect(timeout)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """The results by rank; fails with the tracebacks of the ranks that raised, if any did."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        raised = [
            f"rank {r} raised:\n{outcome.trace}" for r, outcome in enumerate(outcomes) if outcome.error is not None
        ]
        if raised:
            self._kill()  # the ranks may be out of step: the next test gets new ones
            raise AssertionError("\n".join(raised))
        return [outcome.result for outcome in outcomes]

    def errors(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[BaseException]:
        """The exceptions by rank; fails if a rank did not raise."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is not None, f"rank {rank} raised nothing, returned {outcome.result!r}"
        return [outcome.error for outcome in outcomes if outcome.error is not None]

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        self._ranks.end(patience=2.0)
        self._meeting.close()

    def _collect(self, timeout: float) -> list[Outcome]:
        deadline = time.monotonic() + timeout * SLOWER
        outcomes = []
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes, strict=True)):
            # Not by end of file alone: a process that a dead rank forked may hold the other end.
            while not pipe.poll(0.05) and process.is_alive():
                if time.monotonic() > deadline:
                    self._kill()
                    raise AssertionError(f"rank {rank} did not finish within {timeout} s")
            try:
                if not pipe.poll(0.05):
                    raise EOFError
                outcomes.append(pipe.recv())
            except EOFError:
                died = f"died, with exit code {process.exitcode}"
                outcomes.append(Outcome(error=ChildProcessError(f"rank {rank} died"), trace=died))
        return outcomes

    def _kill(self) -> None:
        self._ranks.kill()


@dataclass
class PerRank:
    """An argument that differs between the ranks."""

    values: list[Any]
