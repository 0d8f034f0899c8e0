"""Connections between workers and servers: short messages in JSON, and arrays after them."""

from __future__ import annotations

import json
import queue
import socket
import struct
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import torch

from pycomm.transport.addresses import family_of, join_address

_LONGEST = 1 << 20  # bytes of a message
_STALLED = 10
"""Seconds after which a connection is lost on which nothing moves in the middle of a message: the peer is stopped."""
Message = dict[str, Any]


def tell(connection: Connection, **content: Any) -> None:
    """Send a message. Raises OSError if the connection is lost."""
    connection.send_bytes(json.dumps(content).encode())


def hear(connection: Connection) -> Message:
    """Return the next message. Raises EOFError or OSError if the connection is lost, ValueError if it is malformed."""
    message = json.loads(connection.recv_bytes(_LONGEST))
    if not isinstance(message, dict):
        raise ValueError(f"a message is {message!r}, wanted an object")
    return message


def bytes_of(x: torch.Tensor) -> memoryview:
    """Return the bytes of ``x``, which is flat and in CPU memory; not copied."""
    array: Any = x.view(torch.uint8).numpy()  # numpy has no bfloat16
    return memoryview(array).cast("B")


def as_array(content: bytes) -> torch.Tensor:
    """Return bytes as a tensor of them; copied."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def send_array(connection: Connection, x: torch.Tensor) -> None:
    """Send ``x``, which is flat and in CPU memory."""
    connection.send_bytes(bytes_of(x))


def receive_array(connection: Connection, out: torch.Tensor) -> None:
    """Overwrite ``out`` with an array of its size. Raises OSError if another one came."""
    num_bytes = connection.recv_bytes_into(bytes_of(out))
    if num_bytes != out.nbytes:
        raise OSError(f"an array has {num_bytes} bytes, wanted {out.nbytes}")


def connect(address: tuple[str, int], key: bytes) -> Connection:
    """Return a connection to the server at ``address``. Raises OSError or EOFError if there is none."""
    with socket.create_connection(address) as one:  # multiprocessing's Client knows IPv4 only
        connection = Connection(one.detach())
    _prepare(connection)
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException as error:
        connection.close()
        if isinstance(error, AuthenticationError):
            raise OSError(f"{join_address(*address)} is another server: {error}") from error
        raise
    return connection


def _prepare(connection: Any) -> None:
    """Send small messages at once, and do not wait for ever in the middle of one."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            one.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _STALLED, 0))


class Door:
    """Place where workers come in. Threads of its own let them in, as that takes messages to and fro.

    Args:
        host: address to listen at.
        key: secret that workers know.

    Attributes:
        address: where it is.
        bell: becomes readable when somebody has come; :meth:`admitted` then returns them.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self._listener, self._key = Listener((host, 0), family=family_of(host).name, backlog=128), key
        found = self._listener.address
        assert isinstance(found, tuple)
        self.address: tuple[str, int] = (found[0], found[1])
        self._inside: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.bell, self._ring = socket.socketpair()
        self._is_closed = False
        threading.Thread(target=self._let_in, name="pycomm-server-door", daemon=True).start()

    def _let_in(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                connection = None
            if self._is_closed:
                if connection is not None:
                    connection.close()
                return
            if connection is not None:  # one who is slow to prove itself does not keep others out
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        try:
            _prepare(connection)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            self._inside.put(connection)
            self._ring.send(b"!")
        except (AuthenticationError, EOFError, OSError):
            connection.close()

    def admitted(self) -> list[Connection]:
        """Return those who have come since the last call."""
        self.bell.recv(1024)
        found = []
        while not self._inside.empty():
            found.append(self._inside.get())
        return found

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_closed = True
        with socket.socket(family_of(self.address[0])) as last:  # wakes the thread, which closing alone does not
            last.settimeout(1.0)
            last.connect_ex(self.address)
        self._listener.close()
        self._ring.close()
        self.bell.close()
