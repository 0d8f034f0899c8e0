"""Groups of ranks for the benches that a launcher such as MPI's starts; WorkerGroup starts others here.

Ranks that a launcher starts connect to a Unix socket, and the kernel tells that they are of the same user.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from bench.harness import worker as worker_module
from bench.harness.group import PATIENCE_SECONDS, STARTUP_SECONDS, Start, WorkerGroup
from bench.harness.processes import kill_session
from bench.harness.worker import DRIVER
from pycomm.collectives.transport.rendezvous import listen, process_behind
from pycomm.tools.launching import Outputs, Pipe, RankError, join

__all__ = ["KEEP_MEMORY", "WorkerGroup", "by_launcher", "join_group"]

# Autograd allocates fresh gradients in every step. By default the allocator gives them back to the
# kernel and gets zeroed pages again, which costs more than many a kernel and hides what is compared.
# 32 MiB is the most that every glibc accepts for the second, and more than the largest gradient.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def by_launcher(name: str, launcher: Sequence[str]) -> Start:
    """Have ranks started by the command ``launcher``, which takes ``-n size`` and what to start; ``name``: for errors.

    It starts ``size`` copies, and tells them their ranks.
    """
    return functools.partial(LaunchedRanks, name, launcher)


class LaunchedRanks:
    """Ranks that the command ``launcher`` has started, and the pipes to them."""

    def __init__(self, name: str, launcher: Sequence[str], size: int, variables: Mapping[str, str]) -> None:
        self.pipes: list[Pipe] = []
        self.processes: list[BaseProcess] = []
        self.outputs: list[Outputs] = []
        by_rank: dict[int, Pipe] = {}
        with listen(size) as server:
            # The ranks import what the driver imports, wherever that was started: by file, as `-m` would put the
            # current directory first, which may be a source tree without the extension.
            search = os.pathsep.join(path or os.getcwd() for path in sys.path)
            own = {DRIVER: bytes(server.getsockname()).hex(), "PYTHONPATH": search}
            command = [*launcher, "-n", str(size), sys.executable, str(worker_module.__file__)]
            # A session of its own: Ctrl-C must reach the driver alone, which then ends its ranks in order.
            self._launcher = subprocess.Popen(
                command, env={**os.environ, **variables, **own}, stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                deadline = time.monotonic() + STARTUP_SECONDS
                while len(by_rank) < size:
                    status = self._launcher.poll()
                    if status is not None:
                        raise RankError(f"{name}: a process ended with status {status} before it connected")
                    if time.monotonic() > deadline:
                        raise RankError(f"{name}: {len(by_rank)} of {size} ranks came up in time")
                    by_rank.update(_accepted(server))
            except BaseException:
                self.pipes = list(by_rank.values())
                self.end()
                raise
        self.pipes = [by_rank[rank] for rank in range(size)]

    def end(self) -> None:
        """Hang up, let the ranks finish their turn and end; kill what is left even so, the launcher's children too."""
        for pipe in self.pipes:
            pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(2 * PATIENCE_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End all ranks at once."""
        kill_session(self._launcher)


def _accepted(server: socket.socket) -> dict[int, Pipe]:
    """Return the pipe to a rank, by its number, if one connects now; processes of other users get none."""
    server.settimeout(0.5)
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return {}
    if process_behind(connection) is None:
        connection.close()
        return {}
    connection.setblocking(True)
    pipe: Pipe = Connection(connection.detach())
    return {pipe.recv(): pipe}


def join_group(port: int) -> tuple[int, int]:
    """Join the default process group, in a rank; returns its rank and how many there are."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(port, rank, size)
    return rank, size
