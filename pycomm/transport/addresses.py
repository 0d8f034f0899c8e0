"""Addresses of hosts, of IPv4 and of IPv6, and what listens at that of the loopback device."""

from __future__ import annotations

import functools
import ipaddress
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_DISCARD = 9  # a port; nothing is sent to it
_LAST_PORT = 65535


def split_address(address: str, name: str, whose: str) -> tuple[str, int]:
    """Return host and port of "host:port". An address of IPv6 may stand in brackets: "[fe80::1%eth0]:29500".

    Args:
        address: the text.
        name, whose: what errors call it: "join", "the process group's store".

    Raises:
        TypeError, ValueError: it is something else.
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
    """Return "host:port", from which :func:`split_address` makes both again."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def is_ipv6(host: str) -> bool:
    """Return whether ``host`` is an address of IPv6 in digits, perhaps with an interface ("fe80::1%eth0")."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address in digits."""
    return socket.AF_INET6 if is_ipv6(host) else socket.AF_INET


def address_towards(host: str) -> str:
    """Return this host's address as ``host`` sees it: of IPv4 if both have one, else of IPv6.

    Raises:
        OSError: there is no way to it.
    """
    problem: OSError | None = None
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as one:
                one.connect((host, _DISCARD))
                return str(one.getsockname()[0])
        except OSError as error:  # socket.gaierror is one
            problem = problem or error
    assert problem is not None
    raise problem


@functools.cache
def loopback() -> str:
    """Return the address by which processes of this host reach each other: that of IPv6 where there is no other."""
    for host in ("127.0.0.1", "::1"):
        try:
            with socket.socket(family_of(host), socket.SOCK_STREAM) as one:
                one.bind((host, 0))
                return host
        except OSError:
            continue
    raise OSError("this host has no loopback device: neither 127.0.0.1 nor ::1 can be bound")


def store_on_loopback(patience: timedelta) -> TCPStore:
    """Return a new store of torch that listens on the loopback device only, at a free port: its ``port``.

    torch's own stores listen on all devices, whatever address they are given.
    """
    with socket.create_server((loopback(), 0), family=family_of(loopback())) as server:
        port = server.getsockname()[1]
        # Without libuv, by which torch 2.4 takes no socket that listens already.
        options: dict[str, Any] = {"wait_for_workers": False, "timeout": patience, "use_libuv": False}
        return TCPStore(loopback(), port, is_master=True, master_listen_fd=server.detach(), **options)
