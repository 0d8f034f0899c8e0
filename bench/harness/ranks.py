"""Groups of ranks for the benches: those of ``pycomm bench``, and others that a launcher such as MPI's starts.

Ranks that a launcher starts connect to a Unix socket, and the kernel tells that they are of the same user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection

from bench.harness import worker as worker_module
from bench.harness.processes import kill_session
from bench.harness.worker import DRIVER
from pycomm.cli.bench.ranks import PATIENCE_SECONDS, STARTUP_SECONDS, Ranks, Start
from pycomm.launching import Pipe, RankError, join
from pycomm.transport.authentication import process_behind
from pycomm.transport.rendezvous import listen

__all__ = ["KEEP_MEMORY", "Ranks", "by_launcher", "join_group"]

# Autograd allocates fresh gradients in every step. By default the allocator gives them back to the
# kernel and gets zeroed pages again, which costs more than many a kernel and hides what is compared.
# 32 MiB is the most that every glibc accepts for the second, and more than the largest gradient.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def by_launcher(name: str, launcher: Sequence[str]) -> Start:
    """Have ranks started by the command ``launcher``, which takes ``-n size`` and what to start; ``name``: for errors.

    It starts ``size`` copies, and tells them their ranks.
    """

    @contextlib.contextmanager
    def start(worker: str, size: int, variables: Mapping[str, str]) -> Iterator[list[Pipe]]:
        pipes: list[Pipe] = []
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(listen(size))
            # The ranks import what the driver imports, wherever that was started: by file, as `-m` would put the
            # current directory first, which may be a source tree without the extension.
            search = os.pathsep.join(path or os.getcwd() for path in sys.path)
            own = {DRIVER: bytes(server.getsockname()).hex(), "PYTHONPATH": search}
            command = [*launcher, "-n", str(size), sys.executable, str(worker_module.__file__), worker]
            # A session of its own: Ctrl-C must reach the driver alone, which then ends its ranks in order.
            process = subprocess.Popen(
                command, env={**os.environ, **variables, **own}, stdin=subprocess.DEVNULL, start_new_session=True
            )
            stack.callback(_hang_up, process, pipes)
            deadline = time.monotonic() + STARTUP_SECONDS
            while len(pipes) < size:
                if process.poll() is not None:
                    raise RankError(f"{name}: a process ended with status {process.returncode} before it connected")
                if time.monotonic() > deadline:
                    raise RankError(f"{name}: {len(pipes)} of {size} ranks came up in time")
                pipes += _accept(server)
            yield pipes

    return start


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
