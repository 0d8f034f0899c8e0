"""Meeting of ranks whose launcher says who they are, but not where: rank 0 tells the others its address."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import http.client
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

from pycomm import threads
from pycomm.transport.authentication import own_folder, process_behind

_POLL = 0.02  # seconds
_TO_ANSWER = 5.0
"""Seconds in which a process that has connected says which rank it is, or is told the address."""
_RANK = struct.Struct("!I")
_KEY = "/pycomm/address"


def through_horovodrun(server: tuple[str, int], mine: str | None, patience: float) -> str:
    """Return rank 0's address, which is ``mine`` there, through the key-value store that horovodrun serves by HTTP.

    Raises:
        TimeoutError: there is no answer within ``patience`` seconds.
    """
    deadline = time.monotonic() + patience
    if mine is not None:
        _ask(server, "PUT", mine)
        return mine
    while (answer := _ask(server, "GET", None)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not told horovodrun at {server[0]}:{server[1]} where it is in {patience} s")
        time.sleep(_POLL)
    return answer


def _ask(server: tuple[str, int], method: str, content: str | None) -> str | None:
    connection = http.client.HTTPConnection(*server, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, _KEY, body=content)
        response = connection.getresponse()
        text = response.read().decode()
        return text if response.status == http.client.OK else None


def on_this_host(job: str, rank: int, mine: str, size: int, patience: float) -> str:
    """Return rank 0's address, which is ``mine`` there, through a socket in a folder that is this user's alone.

    Args:
        job: what this job has and no other one of this user on this host.
        rank: of this process.
        mine: the address, on rank 0. A thread tells it all other ranks, until ``patience`` is over.
        size: number of ranks.
        patience: seconds.

    Raises:
        TimeoutError: rank 0 does not come.
        ValueError: another process is rank 0 of the job.
        PermissionError: there is no such folder.
    """
    name = f"pycomm-horovod-{hashlib.sha256(job.encode()).hexdigest()[:32]}"
    with _in_own_folder(name) as path:
        if rank > 0:
            return _ask_rank_0(path, job, rank, patience)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _bind(listener, path, job)
            listener.listen(size)
        except BaseException:
            listener.close()
            raise
    file = own_folder() / name
    remove = functools.partial(file.unlink, missing_ok=True)
    atexit.register(remove)
    until = time.monotonic() + patience
    tell = functools.partial(_tell, listener, mine, size, until, remove)
    threads.start(tell, "pycomm-horovod-meeting", functools.partial(listener.shutdown, socket.SHUT_RDWR))
    return mine


@contextlib.contextmanager
def _in_own_folder(name: str) -> Iterator[str]:
    """Yield a path of the file ``name`` there that is short enough for a socket."""
    descriptor = os.open(own_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def _bind(listener: socket.socket, path: str, job: str) -> None:
    try:
        listener.bind(path)
        return
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        if other.connect_ex(path) == 0:
            raise ValueError(f"another process is rank 0 of the job {job!r} on this host")
    os.unlink(path)  # of a job that was killed
    listener.bind(path)


def _ask_rank_0(path: str, job: str, rank: int, patience: float) -> str:
    deadline = time.monotonic() + patience
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, contextlib.suppress(OSError):
            connection.settimeout(_TO_ANSWER)
            connection.connect(path)
            if process_behind(connection) is not None:
                connection.sendall(_RANK.pack(rank))
                if answer := connection.recv(1024).decode():
                    return answer
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 of the job {job!r} was not found on this host in {patience} s; set MASTER_ADDR and "
                "MASTER_PORT if the ranks have different parents"
            )
        time.sleep(_POLL)


def _tell(listener: socket.socket, address: str, size: int, until: float, remove: Callable[[], None]) -> None:
    """Tell each other rank the address, however often it asks, until all have asked."""
    left = set(range(1, size))
    with listener:
        while left and (seconds := until - time.monotonic()) > 0:
            listener.settimeout(seconds)
            try:
                connection, _ = listener.accept()
            except OSError:  # the time is over, or the process ends
                break
            with connection, contextlib.suppress(OSError, struct.error):
                if process_behind(connection) is None:
                    continue
                connection.settimeout(_TO_ANSWER)
                (rank,) = _RANK.unpack(connection.recv(_RANK.size))
                connection.sendall(address.encode())
                left.discard(rank)
        remove()
    atexit.unregister(remove)
