"""Groups of processes on this host that stay, and do something when they are told to.

The driver starts every group once and lets them work in turns. Between turns a rank blocks in a read: it uses no core,
whatever its communication library does while it waits. A rank holds one *worker*, an object made from its import name,
whose methods the driver calls on all ranks of the group at once. Ranks are started here, by ``pycomm.launching``, or
by a launcher such as MPI's: those connect to a Unix socket, and the kernel tells that they are of the same user.

Nothing stays behind: ranks end when the driver does, however that ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from pycomm.cli.bench import worker as worker_module
from pycomm.cli.bench.processes import kill_session
from pycomm.cli.bench.worker import DRIVER, PATIENCE_SECONDS, Pipe, serve
from pycomm.launching import LocalRanks, RankError, join
from pycomm.transport.authentication import process_behind
from pycomm.transport.rendezvous import listen

# Autograd allocates fresh gradients in every step. By default the allocator gives them back to the
# kernel and gets zeroed pages again, which costs more than many a kernel and hides what is compared.
# 32 MiB is the most that every glibc accepts for the second, and more than the largest gradient.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}

_STARTUP_SECONDS = 120.0
_TURN_SECONDS = 600.0
_QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Ranks:
    """Group of ``size`` processes with a ``worker`` ("module:Class") each. A context manager.

    Args:
        name: for error messages.
        setup: what the worker's constructor is given.
        launcher: command that starts ``-n size`` copies of what follows and tells them their ranks
            (MPI); if empty they are started here, with RANK and WORLD_SIZE in their environment.
        environment: added to this process's.

    Raises:
        RankError: a rank did not come up.
    """

    def __init__(
        self,
        name: str,
        worker: str,
        size: int,
        setup: Mapping[str, Any],
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.size = name, size
        self._in_order = False
        variables = {**_QUIET, **(environment or {})}
        with contextlib.ExitStack() as started:
            if launcher:
                self._pipes = started.enter_context(_launched(name, worker, size, launcher, variables))
            else:
                self._pipes = started.enter_context(_local(worker, size, variables))
            for pipe in self._pipes:
                self._send(pipe, dict(setup))
            ranks = self._answers(_STARTUP_SECONDS)
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


@contextlib.contextmanager
def _launched(
    name: str, worker: str, size: int, launcher: Sequence[str], variables: Mapping[str, str]
) -> Iterator[list[Pipe]]:
    """Have ``launcher`` start ranks, and wait for them to connect."""
    pipes: list[Pipe] = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listen(size))
        # The ranks import what the driver imports, wherever that was started: by file, as `-m` would put the current
        # directory first, which may be a source tree without the extension.
        search = os.pathsep.join(path or os.getcwd() for path in sys.path)
        own = {DRIVER: bytes(server.getsockname()).hex(), "PYTHONPATH": search}
        command = [*launcher, "-n", str(size), sys.executable, str(worker_module.__file__), worker]
        # A session of its own: Ctrl-C must reach the driver alone, which then ends its ranks in order.
        process = subprocess.Popen(
            command, env={**os.environ, **variables, **own}, stdin=subprocess.DEVNULL, start_new_session=True
        )
        stack.callback(_hang_up, process, pipes)
        deadline = time.monotonic() + _STARTUP_SECONDS
        while len(pipes) < size:
            if process.poll() is not None:
                raise RankError(f"{name}: a process ended with status {process.returncode} before it connected")
            if time.monotonic() > deadline:
                raise RankError(f"{name}: {len(pipes)} of {size} ranks came up in time")
            pipes += _accept(server)
        yield pipes


def _accept(server: socket.socket) -> list[Pipe]:
    """Return the pipe to a rank that connects, if one does now; processes of other users get none."""
    server.settimeout(0.5)
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return []
    if process_behind(connection) is None:
        connection.close()
        return []
    connection.setblocking(True)
    return [Connection(connection.detach())]


def _hang_up(process: subprocess.Popen[bytes], pipes: Sequence[Pipe]) -> None:
    """Let the ranks finish their turn and end; kill what is left even so, the launcher's children too."""
    for pipe in pipes:
        pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2 * PATIENCE_SECONDS)
    kill_session(process)


def join_group(port: int) -> tuple[int, int]:
    """Join the default process group, in a rank; returns its rank and how many there are."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(port, rank, size)
    return rank, size
