"""Networks: the costs that links may have, files that are read as they were written, errors that name the entry."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm.schedule import DEFAULT_NETWORK, NETWORKS, Link, Network, load

LINK = {"alpha": 1e-6, "beta": 1e-9, "gamma": 0}
WHOLE = {
    "name": "ours",
    "within_host": LINK,
    "between_hosts": {"alpha": 5e-5, "beta": 1e-8, "gamma": 1e-10},
    "per_host": 8,
    "measured": {"ring": [[0, 1e-4], [1e6, 2e-3]], "native": [[8, 1e-5]]},
    "measured_ranks": 4,
}
MISSING = object()
HUGE = 10**400  # whole, finite, and no float


def changed(path: str, value: Any) -> dict[str, Any]:
    """``WHOLE`` with one entry, "within_host.alpha" say, replaced or missing."""
    data: dict[str, Any] = json.loads(json.dumps(WHOLE))
    *parents, key = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    if value is MISSING:
        del place[key]
    else:
        place[key] = value
    return data


def test_a_link() -> None:
    assert Link(alpha=0, beta=0, gamma=0) == Link(alpha=0.0, beta=0.0, gamma=0.0)
    assert Link(alpha=np.float64(1), beta=1, gamma=1).alpha == 1
    with pytest.raises(TypeError):
        Link(1, 2, 3)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        Link(**LINK).alpha = 2  # type: ignore[misc]


@pytest.mark.parametrize("key", LINK)
@pytest.mark.parametrize(
    "value", [-1e-9, -1, math.nan, math.inf, -math.inf, "1", None, True, [1], 1j, pytest.param(HUGE, id="huge")]
)
def test_links_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key} is .*, wanted a number of seconds, not negative"):
        Link(**{**LINK, key: value})


def a_network(**others: Any) -> Network:
    return Network(name="n", within_host=Link(**LINK), between_hosts=Link(alpha=9, beta=8, gamma=7), **others)


def test_links_and_costs() -> None:
    src, dst = np.array([0, 1, 3, 4, 11]), np.array([3, 4, 4, 7, 0])
    assert a_network(per_host=4).links(src, dst).tolist() == [0, 1, 1, 0, 1]
    assert a_network(per_host=1).links(src, dst).tolist() == [1] * 5
    assert a_network().links(src, dst).tolist() == [0] * 5
    assert {key: values.tolist() for key, values in a_network().costs().items()} == {
        "alpha": [1e-6, 9],
        "beta": [1e-9, 8],
        "gamma": [0, 7],
    }


def test_hosts_of_another_size() -> None:
    network = a_network(per_host=4)
    assert network.with_hosts_of(None) is network
    assert network.with_hosts_of(2) == a_network(per_host=2)
    assert network.per_host == 4
    with pytest.raises(ValueError, match="per_host is 0"):
        network.with_hosts_of(0)


@pytest.mark.parametrize(
    ("others", "why"),
    [
        *(
            ({"per_host": value}, "per_host is .*, wanted a whole number of at least 1")
            for value in (0, -1, 2.0, "2", True)
        ),
        *(
            ({"measured_ranks": value}, "measured_ranks is .*, wanted a whole number")
            for value in (-1, 1.5, None, True)
        ),
        *(
            ({"measured": {"ring": curve}}, r"measured\['ring'\] is .*, wanted \(bytes, seconds\), increasing in bytes")
            for curve in (
                (),
                ((2, 1), (1, 1)),
                ((1, 1), (1, 2)),
                ((-1, 1),),
                ((1, -1),),
                ((1, math.nan),),
                ((math.nan, 1),),
            )
        ),
    ],
)
def test_networks_that_cannot_be(others: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        a_network(**others)


COST = st.floats(0, 1e3)
LINKS = st.builds(Link, alpha=COST, beta=COST, gamma=COST)
CURVE = st.dictionaries(st.floats(0, 1e12), COST, min_size=1).map(lambda curve: tuple(sorted(curve.items())))
ANY_NETWORK = st.builds(
    Network,
    name=st.text(),
    within_host=LINKS,
    between_hosts=LINKS,
    per_host=st.none() | st.integers(1, 10**6),
    measured=st.dictionaries(st.text(), CURVE, max_size=3),
    measured_ranks=st.integers(0, 10**6),
)


@given(ANY_NETWORK)
def test_json_brings_it_back(network: Network) -> None:
    assert Network.from_json(network.to_json()) == network


@pytest.mark.parametrize("name", NETWORKS)
def test_known_networks(name: str, tmp_path: Path) -> None:
    network = load(name)
    assert network is NETWORKS[name]
    assert network.name == name
    assert network.within_host.beta < network.between_hosts.beta
    path = tmp_path / "network.json"
    path.write_text(network.to_json())
    assert load(path) == load(str(path)) == network
    assert load(network) is network


def test_what_may_be_left_out() -> None:
    network = Network.from_json(json.dumps({key: WHOLE[key] for key in ("name", "within_host", "between_hosts")}))
    assert (network.per_host, network.measured, network.measured_ranks) == (None, {}, 0)
    whole = Network.from_json(json.dumps(WHOLE))
    assert whole.measured == {"ring": ((0, 1e-4), (1e6, 2e-3)), "native": ((8, 1e-5),)}
    assert (whole.per_host, whole.measured_ranks, whole.within_host) == (8, 4, Link(**LINK))


def test_the_default() -> None:
    assert load(None) is NETWORKS[DEFAULT_NETWORK]


NO_SECONDS: list[Any] = [-1, "fast", None, True, [], {}]
NO_LINKS: list[Any] = [None, 1, "x", []]
WRONG = [
    *((f"{link}.{key}", MISSING, "is missing") for link in ("within_host", "between_hosts") for key in LINK),
    *((f"within_host.{key}", value, f"is {value!r}") for key in LINK for value in NO_SECONDS),
    *((f"between_hosts.{key}", value, f"is {value!r}") for key in LINK for value in (math.nan, math.inf, -1e-30)),
    *((key, MISSING, "is missing") for key in ("name", "within_host", "between_hosts")),
    *((key, value, f"is {value!r}") for key in ("within_host", "between_hosts") for value in NO_LINKS),
    *(("name", value, f"is {value!r}") for value in (None, 3, ["x"])),
    *(("per_host", value, f"is {value!r}") for value in (0, -8, 1.5, "8", True, [8])),
    *(("measured_ranks", value, f"is {value!r}") for value in (-1, 1.5, "4", None)),
    *(("measured", value, "is ") for value in (None, 1, [1], {"ring": 1}, {"ring": [1]}, {"ring": [[1, 2, 3]]})),
    *(("measured", {"ring": curve}, "") for curve in ([], [[2, 1], [1, 1]], [[-1, 1]], [[1, -1]], [["x", 1]])),
    *(("measured", {"ring": curve}, "") for curve in ([[1, math.nan]], [[1, math.inf]], [["1", "2"]])),
    *(("latency", 1, "is unknown"), ("within_host.delta", 1, "is unknown"), ("between_hosts.Alpha", 1, "is unknown")),
    pytest.param("between_hosts.beta", HUGE, "is ", id="huge"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "why"), WRONG)
def test_wrong_entries_are_named(path: str, value: Any, why: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(ValueError, match=re.escape(f"network file {file}: {path}")) as caught:
        load(file)
    assert why in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "no json", "\x00", '{"name": }'])
def test_files_that_are_no_json(text: str) -> None:
    with pytest.raises(ValueError, match="^mine is not JSON: "):
        Network.from_json(text, "mine")


@pytest.mark.parametrize("text", ["[]", "1", "null", '"ethernet-10g"', "[[1]]"])
def test_files_that_are_no_object(text: str) -> None:
    with pytest.raises(
        ValueError, match="^mine: the whole is .*, wanted an object with name, within_host, between_hosts"
    ):
        Network.from_json(text, "mine")


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for network in ("carrier-pigeon", "", str(tmp_path), tmp_path / "none.json", binary):
        with pytest.raises(
            ValueError, match="no such file that can be read, and none of ethernet-1g, .*infiniband-400g"
        ):
            load(network)
