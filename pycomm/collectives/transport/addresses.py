"""Addresses of hosts, IPv4 and IPv6, and stores on the loopback device."""

from __future__ import annotations

import functools
import ipaddress
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

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
    """Return the whole address of a socket: that of ("fe80::1%eth0", 80) has the interface's number, its scope."""
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
