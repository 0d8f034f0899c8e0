"""What happens between hosts, on network namespaces: ranks that die, hosts that vanish, variables, secrets."""

from __future__ import annotations

import json
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
    """Return what each of ``count`` ranks, one on each host, has found; ``None`` of one that was killed."""
    given = {"PYCOMM_TEST_OWN": json.dumps({str(rank): variables for rank, variables in (own or {}).items()})}
    with namespaces.hosts(count, None) as cluster:
        told = namespaces.run_ranks(cluster, MODULE, [case], timeout=90, environment={**given, **environment})
    return [json.loads(text.splitlines()[-1]) if text.strip() else None for text in told]


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
