"""Proof over one TCP connection between two ranks, in both directions, before it is used.

The proof is challenge and response by HMAC (RFC 2104).
It covers the meeting, both ranks and the kind of the connection, but not the addresses, which may be translated on the
way:

- the listening side sends ``MAGIC`` and a nonce;
- the connecting side sends ``MAGIC``, its rank, the kind, its own nonce and its signature;
- the listening side answers with its signature, or with zeros if it refuses;
- the connecting side sends ``!``, as it has the connection from then on. The listening side counts it only now.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Generator
from typing import Any

from pycomm.collectives.transport.authentication import SECRET, Signer, Step, patiently

MAGIC = b"PYCTCP1\0"
NONCE = 32
"""Bytes of a random number, and of a signature."""
CLOSED = "it closes the connection before a proof"
_WHO = struct.Struct("!II")  # the connecting side's rank, and the kind
_SIGNATURE = NONCE
_REFUSED = bytes(_SIGNATURE)
_TAKEN = b"!"
_HEARD = 48  # bytes of another program's that an error shows


class Handshake:
    """Mutual proof over one non-blocking connection.

    Args:
        one: the connection.
        key: the key of the proofs.
        rank: this rank.
        meeting: name of the meeting.

    Attributes:
        socket: the connection.
        heard: the first bytes that came.
        is_connected: whether the kernel calls it connected.
        is_proven: whether the other side has proved who it is.
        who: the connecting side's rank, and the kind.
    """

    def __init__(self, one: socket.socket, key: bytes, rank: int, meeting: str) -> None:
        one.setblocking(False)
        self.socket, self._key, self._rank, self._meeting = one, key, rank, meeting
        self.heard = b""
        self.is_connected = self.is_proven = False
        self.who = (-1, -1)

    def as_client(self, address: Any, server: int, kind: int) -> Step:
        """Connect to ``address``, and prove this rank's identity; raise OSError unless rank ``server`` proves its own.

        What does not depend on the other side's nonce is sent at once, as another program may only answer then.
        """
        yield from self._connect(address)
        self.is_connected, self.who = True, (self._rank, kind)
        mine = secrets.token_bytes(NONCE)
        with contextlib.suppress(ConnectionError):  # another program may have answered and closed, which is read next
            yield from self._send(MAGIC + _WHO.pack(*self.who) + mine)
        nonce = (yield from self._receive(len(MAGIC) + NONCE, MAGIC))[len(MAGIC) :]
        yield from self._send(self._sign("client", server, nonce, mine))
        proof = yield from self._receive(_SIGNATURE)
        if not hmac.compare_digest(proof, self._sign("server", server, nonce, mine)):
            what = "it refuses this rank" if proof == _REFUSED else "it does not prove that it is one of the group"
            raise ConnectionError(f"{what}: it is of another group, or {SECRET} differs")
        self.is_proven = True
        yield from self._send(_TAKEN)

    def as_server(self, is_expected: Callable[[int, int], bool]) -> Step:
        """Verify who connects, raising OSError if no expected rank does; then prove this rank's identity."""
        self.is_connected, server = True, self._rank
        nonce = secrets.token_bytes(NONCE)
        yield from self._send(MAGIC + nonce)
        hello = yield from self._receive(len(MAGIC) + _WHO.size + NONCE, MAGIC)
        self.who = _WHO.unpack_from(hello, len(MAGIC))
        theirs = hello[-NONCE:]
        proof = yield from self._receive(_SIGNATURE)
        is_right = hmac.compare_digest(proof, self._sign("client", server, nonce, theirs))
        if not is_right or not is_expected(*self.who):
            yield from self._send(_REFUSED)
            raise ConnectionError(f"it does not prove that it is one of the group: {SECRET} differs")
        self.is_proven = True
        yield from self._send(self._sign("server", server, nonce, theirs))
        if (yield from self._receive(len(_TAKEN))) != _TAKEN:
            raise ConnectionError("it breaks the protocol")

    def any_words(self) -> Step:
        """Send the end of a line; raise an error that shows the answer."""
        yield from self._send(b"\r\n\r\n")
        yield from self._receive(_HEARD, MAGIC)
        raise ConnectionError("it sends no proof")

    def _connect(self, address: Any) -> Step:
        try:
            self.socket.connect(address)
        except (BlockingIOError, InterruptedError):
            yield select.POLLOUT
            problem = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                raise OSError(problem, os.strerror(problem)) from None
        if self.socket.getsockname() == self.socket.getpeername():  # nobody listens, and this port was drawn
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    def _send(self, content: bytes) -> Step:
        while content:
            send = functools.partial(self.socket.send, content, socket.MSG_NOSIGNAL)
            content = content[(yield from patiently(send, select.POLLOUT)) :]

    def _receive(self, num_bytes: int, start: bytes = b"") -> Generator[int, None, bytes]:
        """Return the next bytes. Raise OSError as soon as they do not begin with ``start``."""
        found = b""
        while len(found) < num_bytes:
            more = yield from patiently(functools.partial(self.socket.recv, num_bytes - len(found)), select.POLLIN)
            if not more:
                raise ConnectionError(CLOSED)
            found += more
            self.heard = self.heard or found
            if not found.startswith(start[: len(found)]):
                if found.startswith(MAGIC[:6]):
                    raise ConnectionError("another version of pycomm answers there")
                raise ConnectionError(f"another program answers there: {found[:_HEARD]!r}")
        return found

    def _sign(self, role: str, server: int, nonce: bytes, theirs: bytes) -> bytes:
        parts = (MAGIC.hex(), self._meeting, str(server), *map(str, self.who), nonce.hex(), theirs.hex())
        return bytes.fromhex(Signer(self._key).sign(f"tcp {role}", *parts))
