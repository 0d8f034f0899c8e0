"""Rank that a launcher such as MPI's has started: ``python worker.py MODULE:CLASS``, by the path of this file.

Imports nothing but the standard library: a rank has what its worker imports, and no torch where that has none.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import socket
import struct
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

Pipe: TypeAlias = "Connection[Any, Any]"

DRIVER = "PYCOMM_BENCH_DRIVER"
PATIENCE_SECONDS = 10.0


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


def answer_driver(worker_name: str) -> None:
    """Connect to the driver that the environment names, and serve it."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(bytes.fromhex(os.environ[DRIVER]))
    _process, user, _group = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():  # what the driver says is unpickled
        raise PermissionError("the driver has gone, and another user listens in its place")
    pipe: Pipe = Connection(stream.detach())
    threading.Thread(target=_end_with_driver, args=(pipe.fileno(),), daemon=True).start()
    serve(pipe, worker_name)


def _end_with_driver(descriptor: int) -> None:
    """Once the driver hung up, end this process even if it never comes back from its turn.

    Not at once: a turn takes a second or so, and who ends in order leaves nothing behind (MPICH's
    shared memory has a name).
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    time.sleep(PATIENCE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.path.pop(0)  # this directory: its modules are found as parts of the package
    answer_driver(sys.argv[1])
