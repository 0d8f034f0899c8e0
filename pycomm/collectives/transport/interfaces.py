"""Addresses and the port at which this rank listens for the ranks of other hosts.

The own host name is never resolved: many hosts give it the loopback address. The address by which this host reaches the
store comes first, as the others reach the store too. All other global addresses follow. Which of them a rank reaches is
found by trying, as the other side has to prove who it is (``transport.connections``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import ipaddress
import itertools
import os
import random
import resource
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pycomm.collectives.transport.authentication import (
    address_towards,
    family_of,
    is_ipv6,
    join_address,
    loopback,
    socket_address,
    split_address,
)

INTERFACE, PORTS, ADVERTISE = "PYCOMM_SOCKET_IFNAME", "PYCOMM_PORT_RANGE", "PYCOMM_ADVERTISE"
MOST_ADDRESSES = 16
LONGEST_ADDRESS = 100  # characters
_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_VIRTUAL = ("docker*", "virbr*", "veth*", "br-*")  # of containers and guests: only this host reaches them
_BACKLOG = 4096  # the kernel lowers it to net.core.somaxconn
_LAST_PORT = 65535
_TRIES = 16  # for one free port of both families
_SPARE = 16  # descriptors that stay free for other uses

_HEADER, _ADDRESS, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")  # of netlink
_ERROR, _DONE, _NEW_ADDRESS, _GET_ADDRESS = 2, 3, 20, 22
_REQUEST_ALL = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_UNUSABLE = 0x08 | 0x40  # another host has it, or that is not known yet
_SIOCGIFFLAGS, _IFF_UP = 0x8913, 1


class Own(NamedTuple):
    """Address of this host: ``interface`` is "" if it is not known, ``host`` has the interface if it is link-local."""

    interface: str
    host: str

    def __str__(self) -> str:
        return f"{self.interface or 'unknown'} {self.host}"


@dataclass(frozen=True)
class Listener:
    """Sockets at which this rank listens, not blocking, and the ``addresses`` ("host:port") to try, in this order."""

    sockets: list[socket.socket]
    addresses: list[str]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the sockets."""
        for one in self.sockets:
            one.close()


def listen(towards: str | None) -> Listener:
    """Return sockets that listen where the ranks of other hosts can reach this one.

    ``PYCOMM_SOCKET_IFNAME`` restricts the interfaces, ``PYCOMM_PORT_RANGE`` the port. ``PYCOMM_ADVERTISE`` replaces the
    addresses that others try.

    Args:
        towards: host of the store; ``None`` if it has none.

    Raises:
        ValueError: a variable is malformed, or matches no interface.
        OSError: there is no port.
    """
    advertised = os.environ.get(ADVERTISE, "")
    if advertised:
        split_address(advertised, ADVERTISE, "this rank, as the others reach it")
        if len(advertised) > LONGEST_ADDRESS:
            raise ValueError(f"{ADVERTISE} has {len(advertised)} characters, wanted at most {LONGEST_ADDRESS}")
    ports = port_range(os.environ.get(PORTS, ""))
    own = own_addresses()
    restricted = restricted_hosts(own, towards)
    hosts = restricted if restricted is not None else usual_hosts(own, towards)
    families = list(dict.fromkeys(family_of(host) for host in hosts))
    is_closed = restricted is not None or all(map(_is_loopback, hosts))
    places = hosts if is_closed else ["::" if family == socket.AF_INET6 else "0.0.0.0" for family in families]
    found = _bound(places, ports)
    by_place = dict(zip(places, found, strict=True))
    by_family = {one.family: one for one in found if one is not None}
    addresses = []
    for host in hosts:
        one = by_place.get(host, by_family.get(family_of(host)) if not is_closed else None)
        if one is not None:
            addresses.append(join_address(host, one.getsockname()[1]))
    return Listener([one for one in found if one is not None], [advertised] if advertised else addresses)


def port_range(text: str) -> range:
    """Return the ports of "50000-50100", the value of ``PYCOMM_PORT_RANGE``; 0, for any, if it is empty."""
    if not text:
        return range(1)
    first, _, last = text.strip().partition("-")
    is_pair = all(port.isascii() and port.isdigit() and len(port) <= 5 for port in (first, last))
    if not is_pair or not 0 < int(first) <= int(last) <= _LAST_PORT:
        raise ValueError(f'{PORTS} is {text!r}, wanted the first and the last port, such as "50000-50100"')
    return range(int(first), int(last) + 1)


def own_addresses() -> list[Own]:
    """Return the addresses of this host's interfaces that are up; none where the kernel does not tell."""
    try:
        return [one for one in _asked_of_kernel() if _is_up(one.interface)]
    except (OSError, ValueError, struct.error):  # sandboxes have no netlink
        return []


def usual_hosts(own: Sequence[Own], towards: str | None) -> list[str]:
    """Return the addresses at which others reach this rank, the best first, where no variable restricts them."""
    route = _route(towards)
    if route is not None and _is_loopback(route) and _is_loopback_name(towards):
        return [route]  # nobody on another host reaches that store
    real = [one.host for one in own if _is_global(one.host) and not _is_virtual(one.interface)]
    if route is not None:
        return _first([route, *real])
    virtual = [one.host for one in own if _is_global(one.host)]
    local = [one.host for one in own if not _is_loopback(one.host)]
    return _first(real or virtual or local or [loopback()])


def restricted_hosts(own: Sequence[Own], towards: str | None) -> list[str] | None:
    """Return the addresses of the interfaces that a variable names, the best first; ``None`` without a variable.

    Link-local and loopback addresses are left out if there are others. Raises ValueError if there are none at all.
    """
    name = next((name for name in (INTERFACE, _GLOO, _NCCL) if os.environ.get(name, "").strip()), None)
    if name is None:
        return None
    text = os.environ[name].strip()
    route = _route(towards)
    known = list(own)
    if route is not None and all(one.host != route for one in own):
        known.append(Own("", route))
    found = _first_existing(text, known) if name == _GLOO else matching(text, name, known)
    if not found:
        there = ", ".join(map(str, known)) or "none is known"
        raise ValueError(f"{name} is {text!r}, which matches no interface of this host: {there}")
    hosts = [one.host for one in found]
    useful = [one for one in found if _is_global(one.host) or one.host == route]
    useful = useful or [one for one in found if not _is_loopback(one.host)] or found
    if route not in hosts:
        return _first([one.host for one in useful])
    interface = next(one.interface for one in found if one.host == route)
    # Without an order of the user's, the route comes first; else first of its interface.
    before = [] if text.startswith("^") else list(itertools.takewhile(lambda one: one.interface != interface, useful))
    return _first([one.host for one in [*before, Own(interface, str(route)), *useful]])


def matching(text: str, name: str, own: Sequence[Own]) -> list[Own]:
    """Return the addresses that a list of interfaces names, in the order of the list.

    "eth,ib0" are prefixes of names, "=eth0" is a whole name, "10.1.0.0/16" a network. "^" before the list inverts it,
    "=" before it is for all its entries, as in NCCL.

    Args:
        text: the list.
        name: of the variable, for errors.
        own: addresses of this host.
    """
    is_inverted = text.startswith("^")
    listed = text.removeprefix("^")
    is_whole = listed.startswith("=")
    entries = [entry.strip() for entry in listed.removeprefix("=").split(",")]
    found: dict[Own, None] = {}
    for entry in filter(None, entries):
        found.update(dict.fromkeys(one for one in own if _matches(one, entry, is_whole, name, text)))
    return [one for one in own if one not in found] if is_inverted else list(found)


def require_descriptors(count: int) -> None:
    """Make room for ``count`` more open files: raise the soft limit to the hard one if that is necessary.

    Raises OSError if that is not enough.
    """
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # there is no /proc
        used = 0
    needed = used + count + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, needed):  # the kernel refuses an unlimited hard limit as the soft one
        if needed <= soft or soft == resource.RLIM_INFINITY:
            return
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    if needed > soft != resource.RLIM_INFINITY:
        raise OSError(
            errno.EMFILE,
            f"{count} connections to other ranks need {needed} open files, as {used} are open already, but the limit "
            f"is {soft}: raise it with `ulimit -n {needed}`",
        )


def _matches(one: Own, entry: str, is_whole: bool, name: str, text: str) -> bool:
    if "/" in entry:
        try:
            network = ipaddress.ip_network(entry.removeprefix("="), strict=False)
        except ValueError as error:
            raise ValueError(f"{name} is {text!r}, but {entry!r} is not a network: {error}") from None
        return ipaddress.ip_address(one.host) in network
    if is_whole or entry.startswith("="):
        return one.interface == entry.removeprefix("=")
    return one.interface.startswith(entry)


def _first_existing(text: str, own: Sequence[Own]) -> list[Own]:
    """Return the addresses of the first interface of a list of whole names that exists, as Gloo does."""
    by_name = [[one for one in own if one.interface == name.strip() != ""] for name in text.split(",")]
    return next(filter(None, by_name), [])


def _first(hosts: Sequence[str]) -> list[str]:
    """Return ``hosts`` without repetitions, and no more than a greeting may have."""
    return list(dict.fromkeys(hosts))[:MOST_ADDRESSES]


def _route(towards: str | None) -> str | None:
    """Return the address by which this host reaches ``towards``; ``None`` if there is no route."""
    if towards is None:
        return None
    try:
        return address_towards(towards)
    except (OSError, UnicodeError):  # no name has such characters
        return None


def _is_loopback_name(host: str | None) -> bool:
    """Return whether ``host`` is this host for everybody; a host's name may be, for that host alone."""
    return host is not None and (host.rstrip(".").lower() == "localhost" or _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_global(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    return not (ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_unspecified)


def _is_virtual(interface: str) -> bool:
    return any(fnmatch.fnmatchcase(interface, pattern) for pattern in _VIRTUAL)


def _is_up(interface: str) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            request = struct.pack("16sH22x", interface.encode(), 0)
            flags: int = struct.unpack_from("16xH", fcntl.ioctl(one, _SIOCGIFFLAGS, request))[0]
            return bool(flags & _IFF_UP)
    except OSError:
        return True


def _asked_of_kernel() -> list[Own]:
    """Return the addresses that the kernel lists (RTM_GETADDR), IPv4 first."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as one:
        one.settimeout(1.0)
        length = _HEADER.size + _ADDRESS.size
        one.send(_HEADER.pack(length, _GET_ADDRESS, _REQUEST_ALL, 1, 0) + _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
        found: list[Own] = []
        while True:
            answer = one.recv(1 << 16)
            while answer:
                length, kind, *_ = _HEADER.unpack_from(answer)
                if kind in (_DONE, _ERROR) or length < _HEADER.size:
                    return sorted(found, key=lambda own: is_ipv6(own.host))
                if kind == _NEW_ADDRESS:
                    found += _own_in(answer[_HEADER.size : length])
                answer = answer[(length + 3) & ~3 :]


def _own_in(message: bytes) -> list[Own]:
    """Return the address in a message of the kernel, if there is a usable one."""
    family, _prefix, flags, _scope, index = _ADDRESS.unpack_from(message)
    rest = message[_ADDRESS.size :]
    attributes: dict[int, bytes] = {}
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[(length + 3) & ~3 :]
    raw = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))  # "address" is the other end of a tunnel
    if raw is None or flags & _UNUSABLE or family not in (socket.AF_INET, socket.AF_INET6):
        return []
    name, ip = socket.if_indextoname(index), ipaddress.ip_address(raw)
    needs_scope = ip.version == 6 and ip.is_link_local
    return [Own(name, f"{ip}%{name}" if needs_scope else str(ip))]


def _bound(hosts: Sequence[str], ports: range) -> list[socket.socket | None]:
    """Return a listening socket for each of ``hosts``, ``None`` where that is impossible; of one port if there is one.

    Raises OSError if there is none at all.
    """
    problem: OSError | None = None
    order = [0] * _TRIES if ports == range(1) else random.sample(ports, len(ports))
    for port in order:
        try:
            return _at_one_port(hosts, port)
        except OSError as error:
            problem = error
    if len(hosts) > 1:  # no port is free for all
        found: list[socket.socket | None] = []
        for host in hosts:
            try:
                found += _bound([host], ports)
            except OSError as error:
                problem = error
                found.append(None)
        if any(one is not None for one in found):
            return found
    assert problem is not None
    if ports == range(1):
        raise problem
    text = os.environ.get(PORTS, f"{ports[0]}-{ports[-1]}")
    raise OSError(problem.errno, f"{PORTS} is {text!r}, and none of these ports can be used: {problem.strerror}")


def _at_one_port(hosts: Sequence[str], port: int) -> list[socket.socket | None]:
    """Return sockets that listen at ``hosts`` on one port; any if it is 0. Raises OSError if it is taken."""
    found: list[socket.socket | None] = []
    problem: OSError | None = None
    try:
        for host in hosts:
            try:
                one = _listening(host, port)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise
                problem = error  # this host lacks the family
                found.append(None)
            else:
                found.append(one)
                port = one.getsockname()[1]
        if problem is not None and not any(found):
            raise problem
    except BaseException:
        for other in found:
            if other is not None:
                other.close()
        raise
    return found


def _listening(host: str, port: int) -> socket.socket:
    family = family_of(host)
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:  # connections of an earlier group may still be at this port
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(socket_address(host, port, family))
        one.listen(_BACKLOG)
        one.setblocking(False)
    except BaseException:
        one.close()
        raise
    return one
