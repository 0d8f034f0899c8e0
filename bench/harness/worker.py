"""Rank that a launcher such as MPI's has started: ``python worker.py``, by the path of this file."""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
from multiprocessing.connection import Connection

from bench.harness.group import PATIENCE_SECONDS
from pycomm.tools.launching import Pipe, serve

DRIVER = "PYCOMM_BENCH_DRIVER"
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")  # as MPICH, Open MPI and this repository call it


def answer_driver() -> None:
    """Connect to the driver that the environment names, and serve it."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(bytes.fromhex(os.environ[DRIVER]))
    _process, user, _group = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.geteuid():  # what the driver says is unpickled
        raise PermissionError("the driver has gone, and another user listens in its place")
    pipe: Pipe = Connection(stream.detach())
    threading.Thread(target=_end_with_driver, args=(pipe.fileno(),), daemon=True).start()
    pipe.send(next(int(os.environ[name]) for name in _RANKS if name in os.environ))
    serve(pipe)


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
    answer_driver()
