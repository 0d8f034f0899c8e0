"""Groups of processes on this host that stay, and do something when they are told to.

The driver starts every group once and lets them work in turns. Between turns a rank blocks in a
read from a socket: it uses no core, whatever its communication library does while it waits. A rank
holds one *worker*, an object made from its import name, whose methods the driver calls on all ranks
of the group at once. Messages are lines of JSON over a local TCP connection, which works alike for
processes started here and by an MPI launcher; a token in the environment keeps strangers out.

Nothing stays behind: each rank watches its connection, also while it is busy, and ends when the
driver does, however that ended.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_DRIVER = "PYCOMM_BENCH_DRIVER"
_TOKEN = "PYCOMM_BENCH_TOKEN"
_STARTUP_SECONDS = 120.0
_TURN_SECONDS = 600.0
_PATIENCE_SECONDS = 10.0


class RankError(RuntimeError):
    """A rank failed, died or gave no answer; ``str`` says which and carries its traceback."""


class Ranks:
    """``size`` processes with a ``worker`` ("module:Class") each. A context manager.

    Args:
        name: for error messages.
        setup: JSON values, given to the worker's constructor.
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
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[_Connection] = []
        try:
            with socket.create_server(("127.0.0.1", 0)) as server:
                token = secrets.token_hex(16)
                own = {_DRIVER: str(server.getsockname()[1]), _TOKEN: token, **(environment or {})}
                self._start(worker, launcher, _environment(own))
                self._accept(server, token)
            for connection in self._connections:
                connection.send(dict(setup))
            ranks = self._answers(_STARTUP_SECONDS)
            # Answers are wanted in the order of the ranks, which connected in any.
            by_rank = sorted(zip(ranks, self._connections, strict=True), key=lambda pair: pair[0])
            self._connections = [connection for _, connection in by_rank]
        except BaseException:
            self._end()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call the workers' ``method`` on all ranks at once; what each returned, in rank order.

        Raises:
            RankError: it raised on one, or one died. The group is of no further use.
        """
        for connection in self._connections:
            connection.send([method, arguments])
        return self._answers(_TURN_SECONDS)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self, worker: str, launcher: Sequence[str], environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "bench.ranks", worker]
        commands = [[*launcher, "-n", str(self.size), *command]] if launcher else [command] * self.size
        for rank, line in enumerate(commands):
            own = environment if launcher else {**environment, "RANK": str(rank), "WORLD_SIZE": str(self.size)}
            # A session of its own: Ctrl-C must reach the driver alone, which then ends its ranks in order.
            self._processes.append(subprocess.Popen(line, env=own, stdin=subprocess.DEVNULL, start_new_session=True))

    def _accept(self, server: socket.socket, token: str) -> None:
        server.settimeout(0.5)
        deadline = time.monotonic() + _STARTUP_SECONDS
        while len(self._connections) < self.size:
            ended = [p for p in self._processes if p.poll() is not None]
            if ended:
                raise RankError(f"{self.name}: a process ended with status {ended[0].returncode} before it connected")
            if time.monotonic() > deadline:
                raise RankError(f"{self.name}: {len(self._connections)} of {self.size} ranks came up in time")
            with contextlib.suppress(TimeoutError, ValueError):  # ValueError: a stranger's, no JSON
                connection = _Connection(server.accept()[0])
                hello = str(connection.receive(_PATIENCE_SECONDS))
                if hmac.compare_digest(hello.encode(), token.encode()):
                    self._connections.append(connection)
                else:
                    connection.close()

    def _answers(self, seconds: float) -> list[Any]:
        """One from each rank, looked at as they come: a failure on one may leave the others waiting."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(answers) < self.size:
            waiting = {c.fileno(): i for i, c in enumerate(self._connections) if i not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"{self.name}: no answer from {len(waiting)} rank(s) for {seconds:.0f} s")
            for descriptor in ready:
                index = waiting[descriptor]
                answer = self._connections[index].receive(_PATIENCE_SECONDS)
                if answer is None:
                    raise RankError(f"{self.name}: a rank died")
                if "error" in answer:
                    raise RankError(f"{self.name}: a rank failed:\n{answer['error']}")
                answers[index] = answer["value"]
        return [answers[index] for index in range(self.size)]

    def _end(self) -> None:
        """Hang up: the ranks finish their turn and end, or are ended; kill what is left even so."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + 2 * _PATIENCE_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # the whole session: a launcher's children too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Connection:
    """Lines of JSON over a stream socket. Each side waits for the other's, so none is ever read ahead."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = stream
        self._lines = stream.makefile("r")

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed by the next receive
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None) -> Any:
        """The next message; ``None`` when the other side hung up."""
        self._socket.settimeout(seconds)
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            return None
        return json.loads(line) if line else None

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextlib.contextmanager
def rendezvous() -> Iterator[int]:
    """The port of a TCPStore in this process, through which a torch process group can meet."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def init_process_group(port: int) -> None:
    """In a rank started here: the default group, Gloo over the loopback device."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    # The ranks import the same bench as the driver, wherever that was started.
    search = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in search if entry),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "1",
        **added,
    }


def serve(worker_name: str) -> None:
    """A rank's life: connect, make the worker, do as told until the driver hangs up."""
    stream = socket.create_connection(("127.0.0.1", int(os.environ[_DRIVER])))
    threading.Thread(target=_end_with_driver, args=(stream.fileno(),), daemon=True).start()
    connection = _Connection(stream)
    connection.send(os.environ.pop(_TOKEN))
    setup = connection.receive(None)
    try:
        module, _, name = worker_name.partition(":")
        worker = getattr(importlib.import_module(module), name)(**setup)
        connection.send({"value": worker.rank})
        while (command := connection.receive(None)) is not None:
            method, arguments = command
            connection.send({"value": getattr(worker, method)(*arguments)})
        worker.close()
    except Exception:
        connection.send({"error": traceback.format_exc()})
        connection.receive(None)  # a launcher would end the others at once, and this message might be lost


def _end_with_driver(descriptor: int) -> None:
    """Once the driver hung up, end this process even if it never comes back from its turn.

    Not at once: a turn takes a second or so, and who ends in order leaves nothing behind (MPICH's
    shared memory has a name).
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    time.sleep(_PATIENCE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
