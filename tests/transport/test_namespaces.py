"""What happens between hosts, on network namespaces: ranks that die, hosts that vanish, variables, secrets."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from bench.slow_network import namespaces

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(namespaces.available()), reason=str(namespaces.available())),
]
MODULE = "tests.transport.namespace_ranks"
SECRET = "what all of these ranks know"


def outcomes(count: int, case: str, own: dict[int, dict[str, str]] | None = None, **environment: str) -> list[Any]:
    """Return what each of ``count`` ranks, one on each host, has found; ``None`` of one that was killed.

    With PYCOMM_TEST_NARROW the switch takes packets of the last host only up to 1,300 bytes.
    """
    given = {"PYCOMM_TEST_OWN": json.dumps({str(rank): variables for rank, variables in (own or {}).items()})}
    with namespaces.hosts(count, None) as cluster:
        if "PYCOMM_TEST_NARROW" in environment:
            switch = cluster[0].name.rpartition("-")[0] + "-switch"
            port = ["dev", f"port{count - 1}", "mtu", "1300"]
            subprocess.run(["ip", "-n", switch, "link", "set", *port], check=True)
        told = namespaces.run_ranks(cluster, MODULE, [case], timeout=90, environment={**given, **environment})
    return [json.loads(text.splitlines()[-1]) if text.strip() else None for text in told]


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`the host of rank ..., ..., has acknowledged nothing for ... s`",
    "Host or network is down. `PYCOMM_DEAD_AFTER` sets the seconds (10).",
)
def test_a_host_that_vanishes_is_named() -> None:
    """Nothing comes from it, and nobody says so: its kernel acknowledges nothing."""
    found = outcomes(3, "vanishes", PYCOMM_DEAD_AFTER="2")
    for outcome in found[:2]:
        assert outcome["kind"] == "CommError"
        assert outcome["peer"] == 2, outcome
        assert outcome["seconds"] < 12
    assert any("has acknowledged nothing for 2 s" in outcome["text"] for outcome in found[:2])


def test_a_rank_that_is_killed_is_named_by_all() -> None:
    for rank, outcome in enumerate(outcomes(4, "dies")):
        if rank == 1:
            assert outcome is None
            continue
        assert (outcome["kind"], outcome["peer"]) == ("CommError", 1), outcome
        assert "rank 1 died" in outcome["text"], outcome
        assert outcome["seconds"] < 5


def test_a_late_rank_is_not_taken_for_dead() -> None:
    for outcome in outcomes(2, "is_late", PYCOMM_DEAD_AFTER="1"):
        assert outcome["kind"] == "", outcome


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PYCOMM_TEST_DOCKER": "1"},
        {"PYCOMM_SOCKET_IFNAME": "=eth0"},
        {"PYCOMM_SOCKET_IFNAME": "^docker,lo", "PYCOMM_TEST_DOCKER": "1"},
        {"PYCOMM_SOCKET_IFNAME": "10.77.0.0/24"},
        {"PYCOMM_PORT_RANGE": "50000-50000"},
        {"PYCOMM_SECRET": SECRET},
    ],
    ids=lambda environment: ", ".join(environment) or "nothing",
)
def test_they_meet(environment: dict[str, str]) -> None:
    for outcome in outcomes(3, "meets", None, **environment):
        assert outcome["kind"] == "", outcome


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"PYCOMM_SOCKET_IFNAME": "nosuch"}, "PYCOMM_SOCKET_IFNAME is 'nosuch'"),
        ({"PYCOMM_PORT_RANGE": "x"}, "PYCOMM_PORT_RANGE is 'x'"),
        ({"PYCOMM_STREAMS": "0"}, "PYCOMM_STREAMS is '0'"),
        ({"PYCOMM_TCP_MSS": "1e3"}, "PYCOMM_TCP_MSS is '1e3'"),
        ({"PYCOMM_SECRET": "another one than the others"}, "PYCOMM_SECRET"),
        ({"PYCOMM_DEAD_AFTER": "soon"}, "PYCOMM_DEAD_AFTER is 'soon'"),
        ({"PYCOMM_TRANSPORT": "pigeon"}, "PYCOMM_TRANSPORT is 'pigeon'"),
    ],
    ids=lambda variables: next(iter(variables)) if isinstance(variables, dict) else "",
)
def test_a_wrong_variable_of_one_rank_is_told_to_all(variables: dict[str, str], wanted: str) -> None:
    for outcome in outcomes(3, "meets", {1: variables}, PYCOMM_SECRET=SECRET, PYCOMM_TEST_TIMEOUT="15"):
        assert outcome["kind"] in ("ValueError", "CommError"), outcome
        assert wanted in outcome["text"], outcome
        assert outcome["seconds"] < 14, outcome


OPEN_PORT = "50000-50000"
FIREWALLS = {
    "the connecting host may not": (
        *(1, "add pref 10 ipproto tcp dport 50000-50999 prohibit"),
        "prohibited: no route, or a firewall",
    ),
    "the listening host drops": (
        *(0, "add pref 10 ipproto tcp dport 50000-50999 blackhole"),
        "no answer: is the port filtered?",
    ),
}


@pytest.mark.parametrize("where", FIREWALLS)
def test_a_firewall_is_named_with_the_address(where: str) -> None:
    """Rules are asked before the table of the host's own addresses."""
    rank, rule, wanted = FIREWALLS[where]
    rules = ["ip rule add pref 100 lookup local", "ip rule del pref 0", f"ip rule {rule}"]
    own = {rank: {"PYCOMM_TEST_SHELL": json.dumps(rules)}}
    for outcome in outcomes(2, "meets", own, PYCOMM_PORT_RANGE=OPEN_PORT, PYCOMM_TEST_TIMEOUT="8"):
        assert outcome["kind"] == "CommError", outcome
        assert "rank 0" in outcome["text"], outcome
        assert f"10.77.0.1:50000: {wanted}" in outcome["text"], outcome
        assert "PYCOMM_PORT_RANGE" in outcome["text"], outcome
        assert outcome["seconds"] < 10, outcome


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`..., whose host acknowledges small packets, but none of ... bytes`",
    "Set the interfaces' MTU to the path's, or `PYCOMM_TCP_MSS=1200` on all ranks.",
)
@pytest.mark.parametrize("mss", ["", "1200"])
def test_a_path_with_a_smaller_mtu(mss: str) -> None:
    """The switch drops what is larger without a word: small operations pass."""
    segments = json.dumps(["ip link set dev eth0 gso_max_segs 1"])
    with_mss = {"PYCOMM_TCP_MSS": mss} if mss else {}
    environment = {"PYCOMM_TEST_NARROW": "1", "PYCOMM_TEST_SHELL": segments, "PYCOMM_TEST_TIMEOUT": "6", **with_mss}
    for count in ("100", "300000"):
        found = outcomes(3, "meets", None, **environment, PYCOMM_TEST_COUNT=count)
        if mss or count == "100":
            assert [outcome["kind"] for outcome in found] == [""] * 3, found
            continue
        assert [outcome["kind"] for outcome in found] == ["CommError"] * 3, found
        assert any("but none of 1448 bytes (is the MTU of the path smaller?" in each["text"] for each in found), found


def test_few_ports_of_its_own_suffice() -> None:
    few = json.dumps(['sysctl -q -w "net.ipv4.ip_local_port_range=40000 40007"'])
    for outcome in outcomes(3, "meets", None, PYCOMM_TEST_SHELL=few):
        assert outcome["kind"] == "", outcome


def test_an_address_that_others_see_through_a_relay() -> None:
    """The rank that listens is behind a translator of addresses: its own port is closed to the others."""
    closed = ["ip rule add pref 100 lookup local", "ip rule del pref 0"]
    closed.append("ip rule add pref 10 dev eth0 ipproto tcp dport 50000-50999 blackhole")
    behind = {
        "PYCOMM_TEST_SHELL": json.dumps(closed),
        "PYCOMM_TEST_RELAY": "40500 10.77.0.1 50000",
        "PYCOMM_ADVERTISE": "10.77.0.1:40500",
    }
    for outcome in outcomes(2, "meets", {0: behind}, PYCOMM_PORT_RANGE=OPEN_PORT):
        assert outcome["kind"] == "", outcome
    del behind["PYCOMM_ADVERTISE"]
    for outcome in outcomes(2, "meets", {0: behind}, PYCOMM_PORT_RANGE=OPEN_PORT, PYCOMM_TEST_TIMEOUT="6"):
        assert outcome["kind"] == "CommError", outcome


def test_more_ranks_at_once_than_a_listener_keeps() -> None:
    short = json.dumps(["sysctl -q -w net.core.somaxconn=1"])
    for outcome in outcomes(10, "meets", None, PYCOMM_TEST_SHELL=short, PYCOMM_TEST_TIMEOUT="60"):
        assert outcome["kind"] == "", outcome
