"""Where a rank listens: which addresses it tells the others, and at which port."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pycomm.collectives.transport import interfaces
from pycomm.collectives.transport.authentication import split_address
from pycomm.collectives.transport.interfaces import (
    Own,
    listen,
    matching,
    own_addresses,
    port_range,
    require_descriptors,
    restricted_hosts,
    usual_hosts,
)

OWN = [
    Own("lo", "127.0.0.1"),
    Own("docker0", "172.17.0.1"),
    Own("eth0", "10.1.0.5"),
    Own("eth1", "192.168.7.5"),
    Own("ib0", "10.2.0.5"),
    Own("lo", "::1"),
    Own("eth0", "fd00::5"),
    Own("eth0", "fe80::5%eth0"),
]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYCOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PYCOMM_PORT_RANGE", "PYCOMM_ADVERTISE"):
        monkeypatch.delenv(name, raising=False)


def route_is(monkeypatch: pytest.MonkeyPatch, host: str | None) -> None:
    """Let this host reach every store by its address ``host``."""

    def towards(_: str) -> str:
        if host is None:
            raise OSError("no route")
        return host

    monkeypatch.setattr(interfaces, "address_towards", towards)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("eth0", ["10.1.0.5", "fd00::5", "fe80::5%eth0"]),
        ("eth", ["10.1.0.5", "192.168.7.5", "fd00::5", "fe80::5%eth0"]),
        ("ib0,eth1", ["10.2.0.5", "192.168.7.5"]),
        (" ib0 , eth1,", ["10.2.0.5", "192.168.7.5"]),
        ("=eth", []),
        ("=eth1", ["192.168.7.5"]),
        ("=eth1,ib0", ["192.168.7.5", "10.2.0.5"]),
        ("ib,=eth1", ["10.2.0.5", "192.168.7.5"]),
        ("^docker,lo,eth0", ["192.168.7.5", "10.2.0.5"]),
        ("^=l,eth,ib0", ["127.0.0.1", "172.17.0.1", "10.1.0.5", "192.168.7.5", "::1", "fd00::5", "fe80::5%eth0"]),
        ("10.0.0.0/8", ["10.1.0.5", "10.2.0.5"]),
        ("10.2.0.9/16", ["10.2.0.5"]),
        ("fd00::/64", ["fd00::5"]),
        ("fe80::/10,ib0", ["fe80::5%eth0", "10.2.0.5"]),
        ("^10.0.0.0/8,lo,docker0,eth1", ["fd00::5", "fe80::5%eth0"]),
        ("eth0,10.1.0.0/16", ["10.1.0.5", "fd00::5", "fe80::5%eth0"]),
    ],
)
def test_lists(text: str, hosts: list[str]) -> None:
    assert [one.host for one in matching(text, "X", OWN)] == hosts


@pytest.mark.parametrize("text", ["10.0.0.0/33", "eth0,10.0.0/x", "/"])
def test_a_malformed_network(text: str) -> None:
    with pytest.raises(ValueError, match=r"PYCOMM_SOCKET_IFNAME is .* is not a network"):
        matching(text, "PYCOMM_SOCKET_IFNAME", OWN)


@pytest.mark.parametrize(
    ("route", "towards", "hosts"),
    [
        ("10.2.0.5", "10.2.0.1", ["10.2.0.5", "10.1.0.5", "192.168.7.5", "fd00::5"]),
        ("172.17.0.1", "172.17.0.2", ["172.17.0.1", "10.1.0.5", "192.168.7.5", "10.2.0.5", "fd00::5"]),
        ("fe80::5%eth0", "fe80::1%eth0", ["fe80::5%eth0", "10.1.0.5", "192.168.7.5", "10.2.0.5", "fd00::5"]),
        ("127.0.0.1", "127.0.0.1", ["127.0.0.1"]),
        ("127.0.0.1", "127.0.1.1", ["127.0.0.1"]),
        ("127.0.0.1", "localhost", ["127.0.0.1"]),
        ("::1", "::1", ["::1"]),
        # A host's own name is often its loopback address, but other hosts reach the store by the same name.
        ("127.0.0.1", "hosta", ["127.0.0.1", "10.1.0.5", "192.168.7.5", "10.2.0.5", "fd00::5"]),
        (None, "10.9.9.9", ["10.1.0.5", "192.168.7.5", "10.2.0.5", "fd00::5"]),
        (None, None, ["10.1.0.5", "192.168.7.5", "10.2.0.5", "fd00::5"]),
    ],
)
def test_without_variables(
    monkeypatch: pytest.MonkeyPatch, route: str | None, towards: str | None, hosts: list[str]
) -> None:
    route_is(monkeypatch, route)
    assert restricted_hosts(OWN, towards) is None
    assert usual_hosts(OWN, towards) == hosts


def test_what_is_left_where_there_is_little() -> None:
    assert usual_hosts([], None) == ["127.0.0.1"]
    assert usual_hosts(OWN[:2], None) == ["172.17.0.1"]
    assert usual_hosts([OWN[0], OWN[-1]], None) == ["fe80::5%eth0"]
    many = [Own("eth0", f"10.0.0.{i}") for i in range(1, 30)]
    assert usual_hosts(many, None) == [one.host for one in many[:16]]


@pytest.mark.parametrize(
    ("variables", "route", "hosts"),
    [
        ({"PYCOMM": "eth"}, "10.2.0.5", ["10.1.0.5", "192.168.7.5", "fd00::5"]),
        ({"PYCOMM": "eth1,eth0"}, "fd00::5", ["192.168.7.5", "fd00::5", "10.1.0.5"]),
        ({"PYCOMM": "^docker"}, "10.2.0.5", ["10.2.0.5", "10.1.0.5", "192.168.7.5", "fd00::5"]),
        ({"PYCOMM": "^docker"}, "127.0.0.1", ["127.0.0.1", "10.1.0.5", "192.168.7.5", "10.2.0.5", "fd00::5"]),
        ({"PYCOMM": "lo"}, "10.1.0.5", ["127.0.0.1", "::1"]),
        ({"PYCOMM": "lo"}, "127.0.0.1", ["127.0.0.1"]),
        ({"PYCOMM": "fe80::/10"}, None, ["fe80::5%eth0"]),
        ({"PYCOMM": "ib0", "GLOO": "eth1", "NCCL": "eth0"}, None, ["10.2.0.5"]),
        ({"GLOO": "eth,eth1,eth0", "NCCL": "ib0"}, None, ["192.168.7.5"]),
        ({"NCCL": "^lo,docker,eth"}, None, ["10.2.0.5"]),
        ({"PYCOMM": " ", "NCCL": "ib0"}, None, ["10.2.0.5"]),
        ({"PYCOMM": "10.3.0.0/16"}, "10.3.0.1", ["10.3.0.1"]),  # where the kernel lists no interfaces
    ],
)
def test_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], route: str | None, hosts: list[str]
) -> None:
    route_is(monkeypatch, route)
    for name, value in variables.items():
        monkeypatch.setenv(f"{name}_SOCKET_IFNAME", value)
    assert restricted_hosts(OWN, "10.9.9.9") == hosts


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYCOMM_SOCKET_IFNAME", "wlan"),
        ("PYCOMM_SOCKET_IFNAME", "10.7.0.0/16"),
        ("PYCOMM_SOCKET_IFNAME", "^lo,docker,eth,ib"),
        ("GLOO_SOCKET_IFNAME", "eth,^lo"),
        ("NCCL_SOCKET_IFNAME", "=eth"),
    ],
)
def test_no_interface_matches(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=f"{name} is .*, which matches no interface of this host: lo 127.0.0.1, doc"
    ) as e:
        restricted_hosts(OWN, None)
    assert repr(value) in str(e.value)
    assert "eth0 fe80::5%eth0" in str(e.value)


def test_this_hosts_interfaces() -> None:
    own = own_addresses()
    names = {name for _, name in socket.if_nameindex()}
    assert {one.interface for one in own} <= names
    for one in own:
        assert split_address(f"[{one.host}]:1" if ":" in one.host else f"{one.host}:1", "it", "this") == (one.host, 1)


@pytest.mark.parametrize("error", [OSError(errno.EAFNOSUPPORT, "no netlink"), ValueError("odd")])
def test_a_kernel_that_does_not_list_them(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse() -> list[Own]:
        raise error

    monkeypatch.setattr(interfaces, "_asked_of_kernel", refuse)
    assert own_addresses() == []
    with listen("127.0.0.1") as listener:
        assert listener.addresses == [f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"]


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("", range(1)),
        ("50000-50100", range(50000, 50101)),
        (" 1-65535 ", range(1, 65536)),
        ("50000-50000", range(50000, 50001)),
    ],
)
def test_port_ranges(text: str, ports: range) -> None:
    assert port_range(text) == ports


@pytest.mark.parametrize(
    "text",
    ["50000", "-", "1-", "-1", "0-5", "5-4", "1-65536", "1-2-3", "a-b", "1.5-2", "²-³", "1 - 2", "1:2", "1-" + "9" * 9],
)
def test_what_is_no_port_range(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PYCOMM_PORT_RANGE", text)
    with pytest.raises(ValueError, match="PYCOMM_PORT_RANGE is .*, wanted the first and the last port"):
        listen("127.0.0.1")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one.getsockname()[1]


def test_a_full_port_range(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.setenv("PYCOMM_PORT_RANGE", f"{taken}-{taken}")
    with pytest.raises(
        OSError, match=f"PYCOMM_PORT_RANGE is '{taken}-{taken}', and none of these ports can be"
    ) as caught:
        listen("127.0.0.1")
    assert caught.value.errno == errno.EADDRINUSE


def test_the_free_port_of_a_range(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.setenv("PYCOMM_PORT_RANGE", f"{taken}-{min(65535, taken + 20)}")
    with listen("127.0.0.1") as one, listen("127.0.0.1") as other:
        ports = [listener.sockets[0].getsockname()[1] for listener in (one, other)]
    assert len({taken, *ports}) == 3
    assert all(taken < port <= taken + 20 for port in ports)


def test_a_port_is_used_again_beside_connections_of_an_earlier_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    monkeypatch.setenv("PYCOMM_PORT_RANGE", f"{port}-{port}")
    with listen("127.0.0.1") as listener:
        client = socket.create_connection(("127.0.0.1", port))
        listener.sockets[0].setblocking(True)
        server, _ = listener.sockets[0].accept()
    with client, server, listen("127.0.0.1") as again:
        assert again.addresses == [f"127.0.0.1:{port}"]


def test_what_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_ADVERTISE", "[2001:db8::7]:4000")
    with listen("127.0.0.1") as listener:
        assert listener.addresses == ["[2001:db8::7]:4000"]
        assert listener.sockets[0].getsockname()[0] == "127.0.0.1"
    for wrong in ("host", "host:0", "::1", f"{'x' * 100}:1"):
        monkeypatch.setenv("PYCOMM_ADVERTISE", wrong)
        with pytest.raises(ValueError, match="PYCOMM_ADVERTISE"):
            listen("127.0.0.1")


def test_both_families_have_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "own_addresses", lambda: OWN)
    with listen(None) as listener:
        places = [one.getsockname()[:2] for one in listener.sockets]
        port = places[0][1]
        assert places == [("0.0.0.0", port), ("::", port)]
        assert listener.addresses == [
            *(f"10.1.0.5:{port}", f"192.168.7.5:{port}", f"10.2.0.5:{port}"),
            f"[fd00::5]:{port}",
        ]
        for one in listener.sockets:
            assert not one.get_inheritable()
            assert not one.getblocking()


def test_chosen_interfaces_alone_are_listened_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_SOCKET_IFNAME", "=lo")
    with listen(None) as listener:
        found = [one.getsockname()[0] for one in listener.sockets]
        assert found in (["127.0.0.1", "::1"], ["127.0.0.1"])
        assert [split_address(text, "it", "this")[0] for text in listener.addresses] == found


def test_an_address_that_cannot_be_bound_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "own_addresses", lambda: [Own("e", "192.0.2.77"), Own("e", "127.0.0.1")])
    monkeypatch.setenv("PYCOMM_SOCKET_IFNAME", "192.0.2.77/32,127.0.0.0/8")
    with pytest.raises(OSError, match="Cannot assign"):
        listen(None)  # the loopback address is no alternative to others
    monkeypatch.setattr(interfaces, "own_addresses", lambda: [Own("e", "192.0.2.77"), Own("e", "127.0.0.1")])
    with listen("127.0.0.1") as listener:
        assert listener.addresses == [f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"]


def test_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyIpv4(socket.socket):
        def __init__(self, family: int = socket.AF_INET, *args: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *args)

    monkeypatch.setattr(interfaces, "own_addresses", lambda: [Own("eth0", "fd00::5"), Own("eth0", "10.1.0.5")])
    monkeypatch.setattr(vars(interfaces)["socket"], "socket", OnlyIpv4)
    with listen(None) as listener:
        (one,) = listener.sockets
        assert listener.addresses == [f"10.1.0.5:{one.getsockname()[1]}"]


def test_nothing_stays_open(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    before = os.listdir("/proc/self/fd")
    with listen(None), listen("127.0.0.1"):
        pass
    monkeypatch.setenv("PYCOMM_PORT_RANGE", f"{taken}-{taken}")
    with pytest.raises(OSError, match="PYCOMM_PORT_RANGE"):
        listen("127.0.0.1")
    assert os.listdir("/proc/self/fd") == before


class Limits:
    """Limits of open files that are nobody's."""

    def __init__(self, soft: int, hard: int) -> None:
        self.now = soft, hard
        self.refused: list[int] = []

    def get(self, _: int) -> tuple[int, int]:
        return self.now

    def set(self, _: int, wanted: tuple[int, int]) -> None:
        if wanted[0] == resource.RLIM_INFINITY:
            self.refused.append(wanted[0])
            raise PermissionError("the kernel has a limit of its own")
        if wanted[0] > wanted[1] != resource.RLIM_INFINITY:
            raise ValueError("not allowed to raise maximum limit")
        self.now = wanted


@pytest.fixture
def used() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("soft", "hard", "count", "after"),
    [(100, 500, 20, 100), (100, 500, 300, 500), (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 9000, -1)],
)
def test_the_soft_limit_rises_when_necessary(
    monkeypatch: pytest.MonkeyPatch, used: int, soft: int, hard: int, count: int, after: int
) -> None:
    base = [limit + used if limit > 0 else limit for limit in (soft, hard)]
    limits = Limits(*base)
    monkeypatch.setattr(vars(interfaces)["resource"], "getrlimit", limits.get)
    monkeypatch.setattr(vars(interfaces)["resource"], "setrlimit", limits.set)
    require_descriptors(count)
    assert limits.now[0] == (after + used if after > 0 else after)


def test_an_unlimited_hard_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(64, resource.RLIM_INFINITY)
    monkeypatch.setattr(vars(interfaces)["resource"], "getrlimit", limits.get)
    monkeypatch.setattr(vars(interfaces)["resource"], "setrlimit", limits.set)
    require_descriptors(5000)
    assert limits.now[0] >= 5000
    assert limits.refused


def test_too_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(1024, 4096)
    monkeypatch.setattr(vars(interfaces)["resource"], "getrlimit", limits.get)
    monkeypatch.setattr(vars(interfaces)["resource"], "setrlimit", limits.set)
    with pytest.raises(
        OSError, match=r"8000 connections .* the limit is 4096: raise it with `ulimit -n 8\d+`"
    ) as caught:
        require_descriptors(8000)
    assert caught.value.errno == errno.EMFILE
