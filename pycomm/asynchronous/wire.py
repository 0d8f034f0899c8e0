"""Connections between workers and servers: who may come in, short messages in JSON, and arrays after them.

A server listens on a Unix socket, for workers of its host: the kernel says that they are processes of the same user.
If the job has a secret, it also listens for other hosts, at the one address by which they reach it, and lets in who
proves that it knows the secret (:mod:`pycomm.transport.authentication`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import queue
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from pycomm import threads
from pycomm.transport.addresses import family_of, join_address
from pycomm.transport.authentication import Proof, Step, process_behind, prove_as_client
from pycomm.untrusted import ANYTHING, MapOf, parse

_ACCESS = os.O_RDWR | os.O_CLOEXEC


class SharedMemory:
    """Piece of memory, made here or opened by the path that another process told.

    Args:
        num_bytes: its size, positive.
        path: where it is; made anew if it is ``None``.

    Attributes:
        path: by which another process of this host opens it, as long as this one has it.

    Raises:
        OSError: there is none, or it is smaller.
    """

    def __init__(self, num_bytes: int, path: str | None = None) -> None:
        made = path is None
        descriptor = os.memfd_create("pycomm-server", os.MFD_CLOEXEC) if path is None else os.open(path, _ACCESS)
        try:
            if made:
                os.ftruncate(descriptor, num_bytes)
            elif os.fstat(descriptor).st_size < num_bytes:  # an access beyond its end would be a SIGBUS
                raise OSError(f"{path} has {os.fstat(descriptor).st_size} bytes, wanted {num_bytes}")
            self._memory = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all of it as a flat tensor, which keeps the memory, but not its path."""
        return torch.frombuffer(self._memory, dtype=dtype)

    def close(self) -> None:
        """Let go of its path. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_LONGEST = 1 << 20  # bytes of a message
_STALLED = 10.0
"""Seconds without progress inside a message, after which the connection counts as lost: the peer is stopped."""
_TO_PROVE = 5.0
"""Seconds within which a new connection must prove itself."""
_MOST_UNPROVEN = 64
"""Most connections that have not proven themselves yet. One more replaces the oldest."""
_PAUSE = 0.1
"""Seconds without new connections once the process has no descriptor left."""
_IN_ONE_PACKET = 1 << 16  # bytes of a message that is copied behind its length
_OBJECT = MapOf(ANYTHING)
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_LENGTH = struct.Struct("!Q")

Message = dict[str, Any]
Address = tuple[str, int]


class Connection:
    """Connection that carries messages of bytes, each behind its length. Not for several threads at once.

    Args:
        one: the socket, by TCP, a Unix socket, or TLS; owned from now on.
    """

    def __init__(self, one: socket.socket) -> None:
        self._socket = one
        one.settimeout(_STALLED)
        if one.family != socket.AF_UNIX:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages travel at once

    def fileno(self) -> int:
        """Return the descriptor, -1 after :meth:`close`."""
        return self._socket.fileno()

    def poll(self, seconds: float = 0.0) -> bool:
        """Return whether there is something to read, or the end, within ``seconds``."""
        if self.has_read_ahead():
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1e3))

    def has_read_ahead(self) -> bool:
        """Return whether TLS has decrypted more than was asked for, which the descriptor does not show."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def send_bytes(self, content: bytes | memoryview) -> None:
        """Send a message. Raises OSError if the connection is lost, or nothing has moved for ten seconds."""
        if len(content) <= _IN_ONE_PACKET:
            self._send(memoryview(_LENGTH.pack(len(content)) + content))
        else:
            self._send(memoryview(_LENGTH.pack(len(content))))
            self._send(memoryview(content))

    def recv_bytes(self, most: int) -> bytearray:
        """Return a message of at most ``most`` bytes. Raises EOFError at the end, OSError as :meth:`send_bytes`."""
        num_bytes = self._receive_length()
        if num_bytes > most:
            raise OSError(f"a message has {num_bytes} bytes, wanted at most {most}")
        content = bytearray(num_bytes)
        self._receive(memoryview(content))
        return content

    def recv_bytes_into(self, out: memoryview) -> None:
        """Receive a message of the size of ``out`` into it; see :meth:`recv_bytes`."""
        num_bytes = self._receive_length()
        if num_bytes != len(out):
            raise OSError(f"an array has {num_bytes} bytes, wanted {len(out)}")
        self._receive(out)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _send(self, content: memoryview) -> None:
        while content:  # not sendall(), whose limit of time is for all of it
            content = content[self._socket.send(content) :]

    def _receive_length(self) -> int:
        head = bytearray(_LENGTH.size)
        self._receive(memoryview(head))
        num_bytes: int = _LENGTH.unpack(head)[0]
        return num_bytes

    def _receive(self, out: memoryview) -> None:
        while out:
            num_bytes = self._socket.recv_into(out)
            if num_bytes == 0:
                raise EOFError("the connection has ended")
            out = out[num_bytes:]


def readable(connections: Collection[Connection], bell: socket.socket, seconds: float) -> tuple[list[Connection], bool]:
    """Return the connections that have something to read, or have ended, and whether the ``bell`` has rung.

    Waits for one of them, at most ``seconds``.
    """
    ahead = [connection for connection in connections if connection.has_read_ahead()]
    poll = select.poll()
    by_descriptor = {connection.fileno(): connection for connection in connections}
    for descriptor in (bell.fileno(), *by_descriptor):
        poll.register(descriptor, select.POLLIN)
    ready = [descriptor for descriptor, _ in poll.poll(0 if ahead else seconds * 1e3)]
    found = [by_descriptor[descriptor] for descriptor in ready if descriptor in by_descriptor]
    return [*found, *(one for one in ahead if one not in found)], bell.fileno() in ready


def send(connection: Connection, **content: Any) -> None:
    """Send a message. Raises OSError if the connection is lost."""
    connection.send_bytes(json.dumps(content).encode())


def receive(connection: Connection, shape: Any = _OBJECT) -> Message:
    """Return the next message. Raises EOFError or OSError if the connection is lost, ValueError if it is malformed.

    Args:
        shape: that it must have, see :func:`pycomm.untrusted.parse`.
    """
    message: Message = parse(bytes(connection.recv_bytes(_LONGEST)), shape, "a message")
    return message


def bytes_of(x: torch.Tensor) -> memoryview:
    """Return the bytes of ``x``, which is flat and in CPU memory; not copied."""
    array: Any = x.view(torch.uint8).numpy()  # numpy has no bfloat16
    return memoryview(array).cast("B")


def as_array(content: bytes | bytearray) -> torch.Tensor:
    """Return bytes as a tensor of them; copied unless they are a bytearray, which the tensor then keeps."""
    content = content if isinstance(content, bytearray) else bytearray(content)
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def send_array(connection: Connection, x: torch.Tensor) -> None:
    """Send ``x``, which is flat and in CPU memory."""
    connection.send_bytes(bytes_of(x))


def receive_array(connection: Connection, out: torch.Tensor) -> None:
    """Overwrite ``out`` with an array of its size. Raises OSError if another one came."""
    connection.recv_bytes_into(bytes_of(out))


def connect(address: Address, key: bytes, context: ssl.SSLContext | None = None) -> Connection:
    """Return a connection to the server of another host at ``address``, once both sides know who they are.

    Args:
        key: the secret of the job.
        context: of TLS.

    Raises:
        OSError: nobody answers there, or somebody who does not know the secret.
    """
    proof = Proof(socket.create_connection(address, _TO_PROVE), key, context)
    try:
        prove_as_client(proof, _TO_PROVE)
    except BaseException as error:
        proof.connection.close()
        if isinstance(error, OSError):
            raise OSError(f"{join_address(*address)}: {error}") from error
        raise
    return Connection(proof.connection)


def connect_here(name: bytes) -> Connection:
    """Return a connection to the server of this host whose Unix socket has that ``name``.

    Raises:
        OSError: nobody answers there, or another user.
    """
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one.settimeout(_TO_PROVE)
        one.connect(name)
        if process_behind(one) is None:
            raise ConnectionError("another user listens there")
    except BaseException:
        one.close()
        raise
    return Connection(one)


@dataclass(eq=False)
class _Visitor:
    """Connection that has not proven itself yet."""

    proof: Proof
    step: Step = field(init=False)
    until: float = field(init=False)
    descriptor: int = field(init=False)

    def __post_init__(self) -> None:
        self.step, self.until = self.proof.as_server(), time.monotonic() + _TO_PROVE
        self.descriptor = self.proof.connection.fileno()  # TLS keeps it

    def close(self) -> None:
        self.step.close()
        self.proof.connection.close()


class WorkerListener:
    """Accepts connections of workers on a thread, and holds few that have not proven themselves.

    Args:
        host: address to listen at for other hosts; ``None``: workers of this host only.
        key: secret of the job, needed with ``host``.
        context: of TLS, for other hosts.

    Attributes:
        name: of the Unix socket.
        address: where it listens for other hosts; ("", 0) if it does not.
        bell: becomes readable when a worker was admitted; see :meth:`admitted`.
    """

    def __init__(
        self, host: str | None = None, key: bytes | None = None, context: ssl.SSLContext | None = None
    ) -> None:
        self._key, self._context = key, context
        self._listeners: list[socket.socket] = []
        self.name, self.address = f"\0pycomm-server-{secrets.token_hex(16)}".encode(), ("", 0)
        with contextlib.ExitStack() as on_error:
            here = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            here.bind(self.name)
            self._listeners.append(here)
            if host is not None:
                assert key is not None
                there = on_error.enter_context(socket.socket(family_of(host), socket.SOCK_STREAM))
                there.bind((host, 0))
                self._listeners.append(there)
                self.address = there.getsockname()[:2]
            for listener in self._listeners:
                listener.listen(128)
                listener.setblocking(False)
            self._inside: queue.SimpleQueue[Connection] = queue.SimpleQueue()
            self.bell, self._ring = map(on_error.enter_context, socket.socketpair())
            self._closing, self._close = map(on_error.enter_context, socket.socketpair())
            self._ring.setblocking(False)
            self._visitors: dict[int, _Visitor] = {}  # by descriptor, the oldest first
            self._events: dict[int, int] = {}  # what each waits for
            self._thread = threads.start(self._let_in, "pycomm-worker-listener", self._close.close)
            on_error.pop_all()

    def admitted(self) -> list[Connection]:
        """Return the connections admitted since the last call."""
        self.bell.recv(1024)
        found = []
        while not self._inside.empty():
            found.append(self._inside.get())
        return found

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._close.close()  # wakes the thread
        self._thread.join()
        while not self._inside.empty():
            self._inside.get().close()
        for one in (*self._listeners, self._closing, self._ring, self.bell):
            one.close()

    # On the thread.

    def _let_in(self) -> None:
        poll, resume = select.poll(), 0.0
        poll.register(self._closing, select.POLLIN | select.POLLHUP)
        listeners = {listener.fileno(): listener for listener in self._listeners}
        while True:
            now = time.monotonic()
            for descriptor in listeners:
                poll.register(descriptor, select.POLLIN if now >= resume else 0)
            for descriptor, event in self._events.items():
                poll.register(descriptor, event)
            ready = [descriptor for descriptor, _ in poll.poll(self._milliseconds(now, resume))]
            if self._closing.fileno() in ready:
                break
            for descriptor in ready:
                if descriptor in self._visitors:
                    self._go_on(poll, self._visitors[descriptor])
            for visitor in [v for v in self._visitors.values() if time.monotonic() > v.until]:
                self._turn_away(poll, visitor)
            for descriptor in ready:
                if descriptor in listeners and not self._accept(poll, listeners[descriptor]):
                    resume = time.monotonic() + _PAUSE
        for visitor in self._visitors.values():
            visitor.close()

    def _milliseconds(self, now: float, resume: float) -> float | None:
        """Return for how long nothing has to be done unless a socket has something."""
        ends = [visitor.until for visitor in self._visitors.values()] + [resume] * (resume > now)
        return None if not ends else max(0.0, min(ends) - now) * 1e3 + 1.0

    def _accept(self, poll: select.poll, listener: socket.socket) -> bool:
        """Accept one connection; return whether more may be accepted now."""
        try:
            one, _ = listener.accept()
        except OSError as error:
            return error.errno not in _EXHAUSTED
        try:
            if listener.family == socket.AF_UNIX:
                if process_behind(one) is None:
                    one.close()
                else:
                    self._admit(one)
                return True
            assert self._key is not None
            if len(self._visitors) >= _MOST_UNPROVEN:
                self._turn_away(poll, next(iter(self._visitors.values())))
            visitor = _Visitor(Proof(one, self._key, self._context))
            self._visitors[visitor.descriptor] = visitor
            self._go_on(poll, visitor)
        except OSError:  # it has ended already
            one.close()
        return True

    def _go_on(self, poll: select.poll, visitor: _Visitor) -> None:
        """Go on with the proof of ``visitor`` as far as it can without waiting."""
        try:
            self._events[visitor.descriptor] = next(visitor.step)
        except StopIteration:
            self._forget(poll, visitor)
            self._admit(visitor.proof.connection)
        except OSError:  # ssl.SSLError is one
            self._turn_away(poll, visitor)

    def _forget(self, poll: select.poll, visitor: _Visitor) -> None:
        descriptor = visitor.descriptor
        del self._visitors[descriptor]
        if self._events.pop(descriptor, None) is not None:
            with contextlib.suppress(KeyError):  # it was never polled
                poll.unregister(descriptor)

    def _turn_away(self, poll: select.poll, visitor: _Visitor) -> None:
        self._forget(poll, visitor)
        visitor.close()

    def _admit(self, one: socket.socket) -> None:
        try:
            self._inside.put(Connection(one))
        except OSError:  # it has ended already
            one.close()
            return
        with contextlib.suppress(BlockingIOError):  # the bell is readable already
            self._ring.send(b"!")
