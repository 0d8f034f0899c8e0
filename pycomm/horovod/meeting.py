"""Meeting of ranks whose launcher says who they are, but not where: rank 0 tells the others its address."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time

_POLL = 0.02  # seconds
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


def on_this_host(job: str, mine: str | None, size: int, patience: float) -> str:
    """Return rank 0's address, which is ``mine`` there, through a socket that only this host's processes see.

    Args:
        job: what this job has and no other one of this user on this host.
        mine: the address, on rank 0; it is told ``size - 1`` others, by a thread, or until ``patience`` is over.
        size: number of ranks.
        patience: seconds.

    Raises:
        TimeoutError: rank 0 does not come.
    """
    name = f"\0pycomm-horovod-{os.geteuid()}-{job}"
    if mine is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(size)
        listener.settimeout(patience)
        threading.Thread(target=_tell, args=(listener, mine, size - 1), daemon=True).start()
        return mine
    deadline = time.monotonic() + patience
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.connect(name)
                answer = connection.recv(1024).decode()
                if answer:
                    return answer
            except (ConnectionError, FileNotFoundError):
                pass
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 of the job {job!r} was not found on this host in {patience} s; set MASTER_ADDR and "
                "MASTER_PORT if the ranks have different parents"
            )
        time.sleep(_POLL)


def _tell(listener: socket.socket, address: str, times: int) -> None:
    with listener, contextlib.suppress(OSError):
        for _ in range(times):
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(address.encode())
