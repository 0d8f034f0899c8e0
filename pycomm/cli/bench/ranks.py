"""Groups of processes on this host that stay, and do something when they are told to.

The driver starts every group once and lets them work in turns. Between turns a rank blocks in a read: it uses no core,
whatever its communication library does while it waits. A rank holds one *worker*, an object made from its import name,
whose methods the driver calls on all ranks of the group at once.

Nothing stays behind: ranks end when the driver does, however that ended.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from typing import Any

from pycomm.launching import LocalRanks, Pipe, RankError

PATIENCE_SECONDS = 10.0
STARTUP_SECONDS = 120.0
_TURN_SECONDS = 600.0
_QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

Start = Callable[[str, int, Mapping[str, str]], contextlib.AbstractContextManager[list[Pipe]]]
"""Starts ranks with that worker, as many, with these variables besides this process's; yields the pipes to them."""


class Ranks:
    """Group of ``size`` processes with a ``worker`` ("module:Class") each. A context manager.

    Args:
        name: for error messages.
        setup: what the worker's constructor is given.
        environment: added to this process's.
        start: how ranks come up; by default they are started here, with RANK and WORLD_SIZE in their environment.

    Raises:
        RankError: a rank did not come up.
    """

    def __init__(
        self,
        name: str,
        worker: str,
        size: int,
        setup: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        start: Start | None = None,
    ) -> None:
        self.name, self.size = name, size
        self._in_order = False
        with contextlib.ExitStack() as started:
            self._pipes = started.enter_context((start or _local)(worker, size, {**_QUIET, **(environment or {})}))
            for pipe in self._pipes:
                self._send(pipe, dict(setup))
            ranks = self._answers(STARTUP_SECONDS)
            # Answers are wanted in the order of the ranks, which connected in any.
            self._pipes = [pipe for _, pipe in sorted(zip(ranks, self._pipes, strict=True), key=lambda pair: pair[0])]
            self._in_order = True
            self._started = started.pop_all()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call the workers' ``method`` on all ranks at once; returns what each returned, in rank order.

        Raises:
            RankError: it raised on one, or one died. The group is of no further use.
        """
        for pipe in self._pipes:
            self._send(pipe, (method, arguments))
        return self._answers(_TURN_SECONDS)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def _send(self, pipe: Pipe, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed by the next answer
            pipe.send(message)

    def _answers(self, seconds: float) -> list[Any]:
        """Take one from each rank as they come: a failure on one may leave the others waiting."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < self.size:
            waiting: dict[Any, int] = {pipe: i for i, pipe in enumerate(self._pipes) if i not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"{self.name}: no answer from {len(waiting)} rank(s) for {seconds:.0f} s")
            for pipe in ready:
                index = waiting[pipe]
                answers[index] = self._answer(index)
        return [answers[index] for index in range(self.size)]

    def _answer(self, index: int) -> Any:
        who = f"rank {index}" if self._in_order else "a rank"
        try:
            answer = self._pipes[index].recv()
        except (EOFError, ConnectionResetError):
            raise RankError(f"{self.name}: {who} died") from None
        if "error" in answer:
            raise RankError(f"{self.name}: {who} failed:\n{answer['error']}")
        return answer["value"]


@contextlib.contextmanager
def _local(worker: str, size: int, variables: Mapping[str, str]) -> Iterator[list[Pipe]]:
    """Start ranks here."""
    with LocalRanks(_serve_locally, size, (worker, size), variables) as ranks:
        try:
            yield list(ranks.pipes)
        finally:  # they finish their turn and end, or are ended
            ranks.end(patience=2 * PATIENCE_SECONDS)


def _serve_locally(rank: int, pipe: Pipe, worker: str, size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    serve(pipe, worker)


def serve(pipe: Pipe, worker_name: str) -> None:
    """Be a rank: make the worker, and do as told until the driver hangs up."""
    try:
        setup = pipe.recv()
        module, _, name = worker_name.partition(":")
        worker = getattr(importlib.import_module(module), name)(**setup)
        pipe.send({"value": worker.rank})
        while (command := _next(pipe)) is not None:
            method, arguments = command
            pipe.send({"value": getattr(worker, method)(*arguments)})
        worker.close()
    except Exception:
        with contextlib.suppress(OSError):  # the driver has hung up: another rank's failure was first
            pipe.send({"error": traceback.format_exc()})
        _next(pipe)  # a launcher would end the others at once, and this message might be lost


def _next(pipe: Pipe) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None
