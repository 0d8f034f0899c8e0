"""Choices of "auto" and of a name: by the network that rank 0 knows, and by the hosts that ranks are on."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch

from pycomm import Communicator, schedule
from pycomm.collectives.transport import algorithms
from pycomm.collectives.transport.algorithms import AlgorithmSelector, ranks_per_host
from pycomm.training.cost import calibration
from pycomm.training.cost.calibration import calibrate
from tests.ranks import PerRank, RankPool

LINK = schedule.Link(alpha=1e-6, beta=1e-9, gamma=0.0)
NETWORK = schedule.Network(name="here", within_host=LINK, between_hosts=LINK)


def chosen(communicator: Communicator, num_elements: int) -> str:
    program = communicator._selector.find("auto", torch.empty(num_elements))
    return "native" if program is None else program.name


def measured(**curves: float) -> schedule.Network:
    """One rate each, in seconds per byte."""
    points = {name: ((1.0, rate), (1e6, 1e6 * rate)) for name, rate in curves.items()}
    return dataclasses.replace(NETWORK, measured=points, measured_ranks=2)


def with_network(network: schedule.Network | None, transport: str) -> list[str]:
    with Communicator(timeout=20, transport=transport, network=network) as communicator:
        x = torch.full((1000,), float(communicator.rank))
        communicator.all_reduce(x)
        assert (x == 1).all()
        return [chosen(communicator, n) for n in (1, 1_000_000)]


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_auto(two_ranks: RankPool, transport: str) -> None:
    def run(mine: schedule.Network | None, other: schedule.Network | None) -> list[str]:
        first, second = two_ranks.run(with_network, PerRank([mine, other]), transport)
        assert first == second
        return list(first)

    assert run(None, None) == ["native", "native"]
    assert run(None, NETWORK) == ["native", "native"], "rank 0's network counts"
    assert run(NETWORK, None) == ["recursive_doubling", "recursive_doubling"]
    assert run(measured(native=2.0, ring=1.0), None) == ["ring", "ring"]
    assert run(measured(native=1.0, ring=2.0), None) == ["native", "native"]
    elsewhere = dataclasses.replace(NETWORK, transport="torch" if transport == "shared_memory" else "shared_memory")
    assert run(elsewhere, None) == ["native", "native"], "that was calibrated over another transport"


def test_a_process_group_of_torch_needs_no_network(two_ranks: RankPool) -> None:
    assert two_ranks.run(with_network, NETWORK, "torch") == [["native", "native"]] * 2


def by_environment(file: str | None) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if file is not None:
            patch.setenv("PYCOMM_NETWORK", file)
        with Communicator(timeout=20) as communicator:
            return chosen(communicator, 1000)


def test_environment(two_ranks: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    file.write_text(NETWORK.to_json())
    assert two_ranks.run(by_environment, str(file)) == ["recursive_doubling"] * 2
    assert two_ranks.run(by_environment, PerRank([str(file), None])) == ["recursive_doubling"] * 2
    file.write_text(json.dumps({"name": "broken"}))
    for error in two_ranks.errors(by_environment, PerRank([None, str(file)])):
        assert isinstance(error, ValueError)
        assert f"rank 1: network file {file}: within_host is missing" in str(error)
    assert two_ranks.run(by_environment, None) == ["native"] * 2


def calibrated() -> tuple[str, list[str]]:
    with Communicator(timeout=60) as communicator:
        network = calibrate(communicator, [1024, 65536])
        assert set(network.measured) >= {"native", "ring", "recursive_doubling", "halving_doubling"}
        assert (network.per_host, network.measured_ranks) == (communicator.size, communicator.size)
    with Communicator(timeout=60, network=network) as communicator:
        x = torch.ones(1000)
        communicator.all_reduce(x)
        assert (x == communicator.size).all()
    return network.to_json(), [name for _, name in schedule.rank_algorithms(3, network).crossovers()]


@pytest.mark.slow
def test_calibration_is_the_same_on_all_ranks(rank_pools: object) -> None:
    assert callable(rank_pools)
    results = rank_pools(3).run(calibrated)
    assert all(result == results[0] for result in results)


def test_calibration_of_one_rank(one_rank_group: None) -> None:
    with Communicator() as communicator, pytest.raises(ValueError, match="the group has one rank"):
        calibrate(communicator)


def said_by(hosts: str, mine: bytes) -> list[bytes]:
    """Return what ranks on these hosts tell each other: no program, no network, which host."""
    return [json.dumps(["", [], host]).encode() for host in hosts]


def test_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ranks_per_host(list(hosts)) for hosts in ("aabb", "aaaa", "ab")] == [2, 4, 1]
    assert [ranks_per_host(list(hosts)) for hosts in ("aab", "abab", "aabbbb", "aabbaa")] == [None] * 4
    for hosts, grid in (
        ("aaabbb", "hierarchical(2,3)"),
        ("aabbcc", "hierarchical(3,2)"),
        ("aaaaaa", "hierarchical(3,2)"),
    ):
        found = AlgorithmSelector(0, 6)
        monkeypatch.setattr(algorithms, "host_identity", lambda: "mine")
        found.agree(None, "tcp", partial(said_by, hosts))
        program = found.find("hierarchical", torch.ones(1))
        assert program is not None
        assert program.name == grid


@pytest.mark.parametrize(
    ("times", "alpha", "beta"),
    [
        ([3e-6, 5e-6, 9e-6], 1e-6, 2e-9),  # a line
        ([3e-6, 5e-3, 9e-6], 1e-6, 2e-9),  # and one that had to wait
        ([5e-6, 5e-6, 5e-6], 5e-6, 0.0),
        ([0.0, 0.0, 0.0], 0.0, 2.5e-13),
        ([9e-6, 5e-6, 3e-6], 3e-6, 0.0),  # larger messages are not faster
    ],
)
def test_the_line_through_messages(times: list[float], alpha: float, beta: float) -> None:
    assert calibration._line([1000, 2000, 4000], times) == pytest.approx((alpha, beta), abs=1e-9)
