"""Addresses of hosts: what users write, of IPv4 and of IPv6."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from pycomm.collectives.transport import authentication
from pycomm.collectives.transport.authentication import (
    address_towards,
    family_of,
    is_ipv6,
    join_address,
    loopback,
    socket_address,
    split_address,
    with_scope_of,
)
from tests.hosts import link_local_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("host:29500", "host", 29500),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:29500", "::1", 29500),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("[2001:db8::7]:80", "2001:db8::7", 80),
        ("::1:29500", "::1", 29500),  # without brackets, where that has one meaning only
        ("2001:db8:0:0:0:0:0:7:80", "2001:db8:0:0:0:0:0:7", 80),
    ],
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address, "join", "the store") == (host, port)
    assert split_address(join_address(host, port), "join", "the store") == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        *("", ":", "host", "host:", ":29500", "host:0", "host:65536", "host:-1", "host:1.5", "host:x", "host: 1"),
        *("host:²", " :1", " host:1", "::1", "fe80::1", "[::1]", "[::1]:", "[::1]29500", "[::1:29500", "::1]:29500"),
        *("[host]:29500", "[10.0.0.1]:29500", "a:b:1", "[]:1", "[[::1]]:1", "http://host:1"),
    ],
)
def test_what_is_none(address: str) -> None:
    with pytest.raises(ValueError, match="join is .*wanted the address of the store, .host:port.") as caught:
        split_address(address, "join", "the store")
    assert repr(address) in str(caught.value)


@pytest.mark.parametrize("address", [None, 29500, ("::1", 29500), b"host:1"])
def test_what_is_no_text(address: Any) -> None:
    with pytest.raises(TypeError, match="join is .*wanted the address"):
        split_address(address, "join", "the store")


def test_families() -> None:
    assert [is_ipv6(host) for host in ("::1", "fe80::1%lo", "127.0.0.1", "host", "")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert family_of("::1") is socket.AF_INET6
    assert family_of("127.0.0.1") is family_of("0.0.0.0") is socket.AF_INET


class OnlyIpv6(socket.socket):
    """Socket of a host that has addresses of IPv6 only."""

    def __init__(self, family: int = socket.AF_INET, *args: Any, **kwargs: Any) -> None:
        if family == socket.AF_INET:
            raise OSError("Address family not supported by protocol")
        super().__init__(family, *args, **kwargs)


@pytest.fixture
def fresh() -> Iterator[None]:
    loopback.cache_clear()
    yield
    loopback.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_this_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loopback() == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_towards("::1") == "::1"
    assert address_towards("localhost") == "127.0.0.1"  # of IPv4, if it has both
    loopback.cache_clear()
    monkeypatch.setattr(vars(authentication)["socket"], "socket", OnlyIpv6)
    assert loopback() == "::1"
    assert address_towards("::1") == "::1"
    with pytest.raises(OSError, match="not supported by protocol"):
        address_towards("127.0.0.1")


def test_another_hosts_link_local_address_has_this_hosts_interface() -> None:
    assert with_scope_of("fe80::1%eth0", "fe80::2%enp3s0") == "fe80::1%enp3s0"
    assert with_scope_of("fe80::1%eth0", "fd00::2") == "fe80::1%eth0"
    assert with_scope_of("fd00::1", "fe80::2%enp3s0") == "fd00::1"


def test_a_link_local_address_keeps_its_interface() -> None:
    address = link_local_address()
    _, _, interface = address.partition("%")
    assert address_towards(address) == address
    assert socket_address(address, 80, family_of(address))[3] == socket.if_nametoindex(interface)
    with socket.socket(family_of(address)) as one:
        one.bind(socket_address(address, 0, family_of(address)))
