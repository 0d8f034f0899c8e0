"""Connections between workers and servers: authentication, short messages in JSON, and arrays.

A server listens on a Unix socket for workers of its host; the kernel tells whether they are processes of the same user.
If the job has a secret, the server also listens at its address for other hosts, and admits workers that prove that they
know the secret (:mod:`pycomm.collectives.transport.authentication`).
"""

from __future__ import annotations

import contextlib
import functools
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
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from pycomm import threads
from pycomm.collectives.transport.authentication import (
    EXHAUSTED,
    Proof,
    Step,
    family_of,
    join_address,
    patiently,
    prove_as_client,
    socket_address,
)
from pycomm.collectives.transport.rendezvous import anonymous_memory, is_sealed_memory, process_behind
from pycomm.untrusted import ANYTHING, MapOf, parse

_ACCESS = os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY


class SharedMemory:
    """Memory that processes of one host share, sealed at its size: beyond its end an access would be a SIGBUS.

    Args:
        num_bytes: its size, positive.
        path: path of another process's memory to open; new memory if ``None``.

    Attributes:
        path: path by which other processes of this host can open the memory until :meth:`close`.
    """

    def __init__(self, num_bytes: int, path: str | None = None) -> None:
        descriptor = anonymous_memory(num_bytes) if path is None else os.open(path, _ACCESS)
        try:
            if not is_sealed_memory(descriptor, num_bytes):
                size = os.fstat(descriptor).st_size
                raise ValueError(f"{path} is not sealed, or has {size} bytes, wanted sealed memory of {num_bytes}")
            self._memory = mmap.mmap(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all of it as a flat tensor, which keeps the memory alive, but not its path."""
        return torch.frombuffer(self._memory, dtype=dtype)

    def close(self) -> None:
        """Release the path. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_LONGEST = 1 << 20  # bytes of a message
STALLED = 10.0
"""Seconds without progress inside a message, after which the connection counts as lost: the peer is stopped."""
_PROOF_LIMIT = 5.0
"""Seconds within which a new connection must prove itself."""
_MOST_UNPROVEN = 64
"""Most connections that have not proven themselves yet. Another one replaces the oldest."""
_PAUSE = 0.1
"""Seconds without new connections once the process has no descriptor left."""
_IN_ONE_PACKET = 1 << 16  # most bytes of a message that is copied to send it together with its length
_OBJECT = MapOf(ANYTHING)
_LENGTH = struct.Struct("!Q")

Message = dict[str, Any]
Address = tuple[str, int]


class Connection:
    """Connection for length-prefixed messages over a TCP, Unix or TLS socket, which it owns. Not thread-safe.

    Each message is a :data:`Step`, which a server continues when the connection is ready; :meth:`finish` waits.
    """

    def __init__(self, one: socket.socket) -> None:
        self._socket = one
        one.setblocking(False)
        if one.family != socket.AF_UNIX:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages travel at once

    def fileno(self) -> int:
        return self._socket.fileno()

    def poll(self, seconds: float = 0.0) -> bool:
        """Return whether data, or the end, can be read within ``seconds``."""
        return self.has_read_ahead() or self._wait(select.POLLIN, seconds)

    def has_read_ahead(self) -> bool:
        """Return whether TLS has decrypted data that was not read yet, which the descriptor does not show."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def sending(self, content: bytes | memoryview) -> Step:
        """Send a message. Raises OSError if the connection is lost."""
        length = _LENGTH.pack(len(content))
        for part in [length + content] if len(content) <= _IN_ONE_PACKET else [length, content]:
            left = memoryview(part)
            while left:
                sent = yield from patiently(functools.partial(self._socket.send, left), select.POLLOUT)
                left = left[sent:]

    def receiving(self, most: int) -> Generator[int, None, bytearray]:
        """Return a message of at most ``most`` bytes. Raises EOFError at the end, OSError as :meth:`sending`."""
        num_bytes = yield from self._receive_length()
        if num_bytes > most:
            raise OSError(f"a message has {num_bytes} bytes, wanted at most {most}")
        content = bytearray(num_bytes)
        yield from self._receive(memoryview(content))
        return content

    def receiving_into(self, out: memoryview) -> Step:
        """Receive a message of the size of ``out`` into it; see :meth:`receiving`."""
        num_bytes = yield from self._receive_length()
        if num_bytes != len(out):
            raise OSError(f"an array has {num_bytes} bytes, wanted {len(out)}")
        yield from self._receive(out)

    def finish(self, step: Generator[int, None, Any]) -> Any:
        """Return the result of ``step``. Raises OSError also if nothing has moved for ten seconds."""
        while True:
            try:
                event = next(step)
            except StopIteration as end:
                return end.value
            if not self._wait(event, STALLED):
                raise TimeoutError(f"nothing has moved for {STALLED:g} s")

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def _wait(self, event: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(seconds * 1e3))

    def _receive_length(self) -> Generator[int, None, int]:
        head = bytearray(_LENGTH.size)
        yield from self._receive(memoryview(head))
        num_bytes: int = _LENGTH.unpack(head)[0]
        return num_bytes

    def _receive(self, out: memoryview) -> Step:
        while out:
            num_bytes = yield from patiently(functools.partial(self._socket.recv_into, out), select.POLLIN)
            if num_bytes == 0:
                raise EOFError("the connection has ended")
            out = out[num_bytes:]


def ready(waits: Mapping[Connection, int], wakeup: socket.socket, seconds: float) -> tuple[list[Connection], bool]:
    """Wait up to ``seconds``; return the connections that can go on, or have ended, and whether ``wakeup`` is readable.

    Args:
        waits: connections, with the event that each waits for.
    """
    ahead = [
        connection for connection, event in waits.items() if event == select.POLLIN and connection.has_read_ahead()
    ]
    poll = select.poll()
    by_descriptor = {connection.fileno(): connection for connection in waits}
    poll.register(wakeup, select.POLLIN)
    for descriptor, connection in by_descriptor.items():
        poll.register(descriptor, waits[connection])
    found = [descriptor for descriptor, _ in poll.poll(0 if ahead else seconds * 1e3)]
    some = [by_descriptor[descriptor] for descriptor in found if descriptor in by_descriptor]
    return [*some, *(one for one in ahead if one not in some)], wakeup.fileno() in found


def send(connection: Connection, **content: Any) -> None:
    """Send a message. Raises OSError if the connection is lost."""
    connection.finish(connection.sending(json.dumps(content).encode()))


def receiving(connection: Connection, shape: Any = _OBJECT) -> Generator[int, None, Message]:
    """Return the next message, of the given shape (:func:`pycomm.untrusted.parse`).

    Raises EOFError or OSError if the connection is lost, ValueError if the message is malformed.
    """
    content = yield from connection.receiving(_LONGEST)
    message: Message = parse(bytes(content), shape, "a message")
    return message


def receive(connection: Connection, shape: Any = _OBJECT) -> Message:
    """Wait for the next message, see :func:`receiving`."""
    message: Message = connection.finish(receiving(connection, shape))
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
    connection.finish(connection.sending(bytes_of(x)))


def receive_array(connection: Connection, out: torch.Tensor) -> None:
    """Overwrite ``out`` with an array of its size. Raises OSError if the array has another size."""
    connection.finish(connection.receiving_into(bytes_of(out)))


def connect(address: Address, key: bytes, context: ssl.SSLContext | None = None) -> Connection:
    """Return a connection to the server of another host at ``address``, after mutual authentication with ``key``."""
    proof = Proof(socket.create_connection(address, _PROOF_LIMIT), key, context)
    try:
        prove_as_client(proof, _PROOF_LIMIT)
    except BaseException as error:
        proof.connection.close()
        if isinstance(error, OSError):
            raise OSError(f"{join_address(*address)}: {error}") from None
        raise
    return Connection(proof.connection)


def connect_here(name: bytes) -> Connection:
    """Return a connection to this host's server with the Unix socket ``name``. Raise OSError if there is none."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        one.settimeout(_PROOF_LIMIT)
        one.connect(name)
        if process_behind(one) is None:
            raise ConnectionError("another user listens there")
    except BaseException:
        one.close()
        raise
    return Connection(one)


@dataclass(eq=False)
class _Pending:
    """Connection that has not proven itself yet."""

    proof: Proof
    step: Step = field(init=False)
    until: float = field(init=False)
    descriptor: int = field(init=False)

    def __post_init__(self) -> None:
        self.step, self.until = self.proof.as_server(), time.monotonic() + _PROOF_LIMIT
        self.descriptor = self.proof.connection.fileno()  # TLS keeps it

    def close(self) -> None:
        self.step.close()
        self.proof.connection.close()


class WorkerListener:
    """Accepts connections of workers on a thread. Few may be pending that have not proven themselves.

    Args:
        host: address to listen at for other hosts; ``None``: workers of this host only.
        key: secret of the job, required with ``host``.
        context: TLS context for other hosts.

    Attributes:
        name: name of the Unix socket.
        address: TCP address for other hosts; ("", 0) if there is none.
        wakeup: becomes readable when a worker was admitted; see :meth:`admitted`.
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
                there.bind(socket_address(host, 0, family_of(host)))
                self._listeners.append(there)
                self.address = host, there.getsockname()[1]
            for listener in self._listeners:
                listener.listen(128)
                listener.setblocking(False)
            self._accepted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
            self.wakeup, self._wakeup_sender = map(on_error.enter_context, socket.socketpair())
            self._closing, self._close = map(on_error.enter_context, socket.socketpair())
            self._wakeup_sender.setblocking(False)
            self._pending: dict[int, _Pending] = {}  # by descriptor, the oldest first
            self._events: dict[int, int] = {}  # events to poll each of them for
            self._thread = threads.start(self._run, "pycomm-worker-listener", self._close.close)
            on_error.pop_all()

    def admitted(self) -> list[Connection]:
        """Return the connections admitted since the last call."""
        self.wakeup.recv(1024)
        found = []
        while not self._accepted.empty():
            found.append(self._accepted.get())
        return found

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._close.close()  # wakes the thread
        self._thread.join()
        while not self._accepted.empty():
            self._accepted.get().close()
        for one in (*self._listeners, self._closing, self._wakeup_sender, self.wakeup):
            one.close()

    # On the thread.

    def _run(self) -> None:
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
                if descriptor in self._pending:
                    self._advance(poll, self._pending[descriptor])
            for pending in [v for v in self._pending.values() if time.monotonic() > v.until]:
                self._reject(poll, pending)
            for descriptor in ready:
                if descriptor in listeners and not self._accept(poll, listeners[descriptor]):
                    resume = time.monotonic() + _PAUSE
        for pending in self._pending.values():
            pending.close()

    def _milliseconds(self, now: float, resume: float) -> float | None:
        """Return the timeout of the next poll; ``None`` for no timeout."""
        ends = [pending.until for pending in self._pending.values()] + [resume] * (resume > now)
        return None if not ends else max(0.0, min(ends) - now) * 1e3 + 1.0

    def _accept(self, poll: select.poll, listener: socket.socket) -> bool:
        """Accept one connection; return whether more may be accepted now."""
        try:
            one, _ = listener.accept()
        except OSError as error:
            return error.errno not in EXHAUSTED
        try:
            if listener.family == socket.AF_UNIX:
                if process_behind(one) is None:
                    one.close()
                else:
                    self._admit(one)
                return True
            assert self._key is not None
            if len(self._pending) >= _MOST_UNPROVEN:
                self._reject(poll, next(iter(self._pending.values())))
            pending = _Pending(Proof(one, self._key, self._context))
            self._pending[pending.descriptor] = pending
            self._advance(poll, pending)
        except OSError:  # it has ended already
            one.close()
        return True

    def _advance(self, poll: select.poll, pending: _Pending) -> None:
        """Continue the proof of ``pending`` as far as possible without waiting."""
        try:
            self._events[pending.descriptor] = next(pending.step)
        except StopIteration:
            self._forget(poll, pending)
            self._admit(pending.proof.connection)
        except OSError:  # ssl.SSLError is one
            self._reject(poll, pending)

    def _forget(self, poll: select.poll, pending: _Pending) -> None:
        descriptor = pending.descriptor
        del self._pending[descriptor]
        if self._events.pop(descriptor, None) is not None:
            with contextlib.suppress(KeyError):  # it was never polled
                poll.unregister(descriptor)

    def _reject(self, poll: select.poll, pending: _Pending) -> None:
        self._forget(poll, pending)
        pending.close()

    def _admit(self, one: socket.socket) -> None:
        try:
            self._accepted.put(Connection(one))
        except OSError:  # it has ended already
            one.close()
            return
        with contextlib.suppress(BlockingIOError):  # wakeup is readable already
            self._wakeup_sender.send(b"!")
