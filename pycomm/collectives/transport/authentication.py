"""Authentication of the peer of a connection: by the kernel on one host, by a shared secret between hosts.

On one host the kernel identifies the peer process (``SO_PEERCRED``). Between hosts each side proves that it knows the
secret of the job without sending it: challenge and response by HMAC (RFC 2104) in both directions. The signature covers
the roles and addresses of both sides, so that nobody can relay it: whoever listens at the port of a dead server gains
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import hmac
import ipaddress
import os
import secrets
import select
import socket
import ssl
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pycomm.untrusted import read_file

_DISCARD = 9  # a port to which nothing is sent
_LAST_PORT = 65535


def split_address(address: str, name: str, whose: str) -> tuple[str, int]:
    """Return host and port of "host:port". An IPv6 address may be in brackets: "[fe80::1%eth0]:29500".

    Args:
        address: the text.
        name, whose: for errors: the argument ("join"), and its owner ("the process group's store").
    """
    wanted = f'wanted the address of {whose}, "host:port" ("[::1]:29500" for one of IPv6)'
    if not isinstance(address, str):
        raise TypeError(f"{name} is {address!r}, {wanted}")
    host, _, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_host = is_ipv6(host) if is_bracketed or ":" in host else host.strip() == host != ""
    if not is_host or not (port.isascii() and port.isdigit()) or not 0 < int(port) <= _LAST_PORT:
        raise ValueError(f"{name} is {address!r}, {wanted}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return "host:port", the inverse of :func:`split_address`."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def is_ipv6(host: str) -> bool:
    """Return whether ``host`` is a numeric IPv6 address, perhaps with an interface ("fe80::1%eth0")."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET


def socket_address(host: str, port: int, family: socket.AddressFamily) -> Any:
    """Return the whole address of a socket: for ("fe80::1%eth0", 80) with the interface's number as its scope."""
    return socket.getaddrinfo(host, port, family)[0][4]


def _with_scope(host: str, port: int, flow: int = 0, scope: int = 0) -> str:
    return f"{host}%{socket.if_indextoname(scope)}" if scope else host


def with_scope_of(address: str, mine: str) -> str:
    """Return another host's link-local ``address`` with the interface of ``mine``, this host's on the same link."""
    host, is_scoped, _ = address.partition("%")
    _, _, interface = mine.partition("%")
    return f"{host}%{interface}" if is_scoped and interface else address


def address_towards(host: str) -> str:
    """Return this host's address as ``host`` sees it, preferably IPv4; with the interface if it is link-local.

    Raises OSError if there is no route.
    """
    problem: OSError | None = None
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as one:
                one.connect(socket_address(host, _DISCARD, family))
                return _with_scope(*one.getsockname())
        except OSError as error:  # socket.gaierror is one
            problem = problem or error
    assert problem is not None
    raise problem


@functools.cache
def loopback() -> str:
    """Return the loopback address of this host: IPv6 only where there is no IPv4."""
    for host in ("127.0.0.1", "::1"):
        try:
            with socket.socket(family_of(host), socket.SOCK_STREAM) as one:
                one.bind((host, 0))
                return host
        except OSError:
            continue
    raise OSError("this host has no loopback device: neither 127.0.0.1 nor ::1 can be bound")


def store_on_loopback(patience: timedelta) -> TCPStore:
    """Return a new store that listens on the loopback device only, at the free port ``store.port``.

    A plain ``TCPStore`` listens on all devices, whatever its address.
    """
    with socket.create_server((loopback(), 0), family=family_of(loopback())) as server:
        port = server.getsockname()[1]
        # Without libuv, whose stores accept no listening socket in torch 2.4.
        options: dict[str, Any] = {"wait_for_workers": False, "timeout": patience, "use_libuv": False}
        return TCPStore(loopback(), port, is_master=True, master_listen_fd=server.detach(), **options)


SECRET, SECRET_FILE = "PYCOMM_SECRET", "PYCOMM_SECRET_FILE"
TLS = "PYCOMM_TLS_CERTIFICATE", "PYCOMM_TLS_KEY", "PYCOMM_TLS_AUTHORITY"
_SHORTEST, _LONGEST = 16, 4096  # characters of a secret
_GREETING = b"pycomm 1"
_NONCE = _PROOF = 32  # bytes
_REFUSED = bytes(_PROOF)
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of ``accept()`` that pass: whoever listens pauses, and goes on."""

Step = Generator[int, None, None]
"""Generator that yields the event it waits for, ``select.POLLIN`` or ``select.POLLOUT``, of a non-blocking socket."""


def own_folder() -> Path:
    """Return a folder that only this user can read or write, creating it if necessary.

    It is the login session's (``XDG_RUNTIME_DIR``), or ``pycomm-<user number>`` in the folder for temporary files.
    """
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and _is_private(session):
        return Path(session)
    folder = Path(tempfile.gettempdir(), f"pycomm-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        raise PermissionError(f"{folder} is not for this user alone: remove it, or set XDG_RUNTIME_DIR")
    return folder


def _is_private(folder: str | Path) -> bool:
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def secret(shortest: int = _SHORTEST) -> bytes | None:
    """Return the secret of this job, of ``PYCOMM_SECRET`` or the file ``PYCOMM_SECRET_FILE``; ``None`` without one.

    Raises ValueError if it has fewer than ``shortest`` characters.
    """
    path, text = os.environ.get(SECRET_FILE), os.environ.get(SECRET)
    if path and text:
        raise ValueError(f"{SECRET} and {SECRET_FILE} are both set: unset one of them")
    if not path and not text:
        return None
    where, found = SECRET, os.fsencode(text or "")
    if path:
        try:
            where, found = path, read_file(path, most=_LONGEST, own=True)
            is_read_by_others = os.stat(path).st_mode & 0o077
        except OSError as error:
            raise ValueError(f"{SECRET_FILE} is {path!r}, which cannot be read: {error}") from None
        if is_read_by_others:
            raise ValueError(f"{path} holds a secret, and others may read it: chmod 600 {path}")
    found = found.strip()
    if len(found) < shortest:
        raise ValueError(
            f"the secret in {where} has {len(found)} characters, wanted at least {shortest} that nobody can guess, "
            "for example of `openssl rand -hex 32`"
        )
    return found


def tls(server: bool) -> ssl.SSLContext | None:
    """Return the TLS context of the listening (``server``) or connecting side; ``None`` without certificates."""
    values = [os.environ.get(name, "") for name in TLS]
    if not any(values):
        return None
    if not all(values):
        missing = [name for name, value in zip(TLS, values, strict=True) if not value]
        raise ValueError(f"{' and '.join(missing)} must be set, as {TLS[0]}, {TLS[1]} and {TLS[2]} belong together")
    certificate, key, authority = values
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the authority serves this job only, and the proof covers the addresses
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
    except OSError as error:  # ssl.SSLError is one
        raise OSError(f"{', '.join(values)}: {error}") from None
    return context


@dataclass(frozen=True)
class Access:
    """Credentials of this process, from its environment.

    Attributes:
        key: the secret of the job; ``None`` without one.
        is_encrypted: whether connections to other hosts use TLS, as certificates are given.
    """

    key: bytes | None = None
    is_encrypted: bool = False

    @classmethod
    def read(cls) -> Access:
        """Read the environment. Raises ValueError or OSError as :func:`secret` and :func:`tls`."""
        key, context = secret(), tls(server=False)
        if context is not None and key is None:
            raise ValueError(f"certificates are given without a secret: set {SECRET} too")
        return cls(key, context is not None)

    def __str__(self) -> str:
        if self.key is None:
            return "no secret"
        fingerprint = _sign(self.key, b"fingerprint").hex()[:16]
        return f"fingerprint {fingerprint}{', with TLS' if self.is_encrypted else ''}"

    def context(self, server: bool) -> ssl.SSLContext | None:
        return tls(server) if self.is_encrypted else None


class Signer:
    """Signer of messages through untrusted channels, such as torch's store; without a ``key`` nothing is signed."""

    def __init__(self, key: bytes | None) -> None:
        self.key = key

    def sign(self, *parts: str) -> str:
        """Return the signature of ``parts``; "" without a secret."""
        return "" if self.key is None else _sign(self.key, *(part.encode("utf-8", "replace") for part in parts)).hex()

    def is_signed(self, signature: object, *parts: str) -> bool:
        """Return whether ``signature`` is :meth:`sign` of ``parts``; False without a secret."""
        is_text = bool(self.key) and isinstance(signature, str)
        return is_text and hmac.compare_digest(str(signature).encode(), self.sign(*parts).encode())


def _sign(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of ``parts``, each preceded by its length."""
    text = b"".join(struct.pack("!I", len(part)) + part for part in parts)
    return hmac.new(key, b"pycomm" + text, hashlib.sha256).digest()


def _addresses(server: Any, client: Any) -> bytes:
    """Return the addresses of both sides in one form: an IPv4 address may also be written as an IPv6 one."""
    found = b""
    for host, port, *_ in (server, client):
        ip = ipaddress.ip_address(host.partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip
        found += ip.packed + struct.pack("!H", port)
    return found


class Proof:
    """Mutual proof of the secret over one non-blocking TCP connection, in three short messages.

    Args:
        one: the connection.
        key: the secret.
        context: TLS context, if the connection is to be encrypted first.

    Attributes:
        connection: the connection to use afterwards; with TLS another object.
    """

    def __init__(self, one: socket.socket, key: bytes, context: ssl.SSLContext | None) -> None:
        one.setblocking(False)
        self.connection, self._key, self._context = one, key, context

    def as_server(self) -> Step:
        """Verify the connecting side's proof, raising OSError if it is wrong; then send this side's."""
        yield from self._encrypt(server=True)
        both = _addresses(self.connection.getsockname(), self.connection.getpeername())
        nonce = secrets.token_bytes(_NONCE)
        yield from self._send(_GREETING + nonce)
        answer = yield from self._receive(_NONCE + _PROOF)
        theirs, proof = answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _sign(self._key, b"worker", nonce, theirs, both)):
            yield from self._send(_REFUSED)
            raise ConnectionError("it does not know the secret")
        yield from self._send(_sign(self._key, b"server", nonce, theirs, both))

    def as_client(self) -> Step:
        """Send this side's proof; then verify the listening side's, raising OSError if it is wrong."""
        yield from self._encrypt(server=False)
        both = _addresses(self.connection.getpeername(), self.connection.getsockname())
        greeting = yield from self._receive(len(_GREETING) + _NONCE)
        if not greeting.startswith(_GREETING):
            raise ConnectionError("another program answers there")
        nonce, mine = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE)
        yield from self._send(mine + _sign(self._key, b"worker", nonce, mine, both))
        proof = yield from self._receive(_PROOF)
        if proof == _REFUSED:
            raise ConnectionError(f"it was refused there: {SECRET} differs, or addresses are translated on the way")
        if not hmac.compare_digest(proof, _sign(self._key, b"server", nonce, mine, both)):
            raise ConnectionError("the program that answers there does not know the secret")

    def _encrypt(self, server: bool) -> Step:
        if self._context is None:
            return
        self.connection = one = self._context.wrap_socket(
            self.connection, server_side=server, do_handshake_on_connect=False
        )
        yield from patiently(one.do_handshake, select.POLLIN)

    def _send(self, content: bytes) -> Step:
        while content:
            sent = yield from patiently(functools.partial(self.connection.send, content), select.POLLOUT)
            content = content[sent:]

    def _receive(self, num_bytes: int) -> Generator[int, None, bytes]:
        found = b""
        while len(found) < num_bytes:
            read = functools.partial(self.connection.recv, num_bytes - len(found))
            more = yield from patiently(read, select.POLLIN)
            if not more:
                raise ConnectionError("the connection has ended before a proof")
            found += more
        return found


def patiently(call: Callable[[], Any], event: int) -> Generator[int, None, Any]:
    """Return the result of ``call`` on a non-blocking socket; wait for ``event``, or what TLS waits for."""
    while True:
        try:
            return call()
        except ssl.SSLWantReadError:
            yield select.POLLIN
        except ssl.SSLWantWriteError:
            yield select.POLLOUT
        except BlockingIOError:
            yield event


def prove_as_client(proof: Proof, seconds: float) -> None:
    """Run ``proof.as_client()`` to its end. Raises OSError if it fails, or takes longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    poll, descriptor = select.poll(), proof.connection.fileno()
    for event in proof.as_client():
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError(f"no proof came in {seconds:g} s")
