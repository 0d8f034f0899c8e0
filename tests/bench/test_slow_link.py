"""Hosts made of network namespaces, and what is measured between them, where root may make them."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.slow_network import namespaces
from bench.slow_network.link import measure
from bench.slow_network.namespaces import NamespaceError, available, hosts, run_ranks
from pycomm.tools.launching import RankError
from tests.processes import child_processes


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """No namespace, process, device or open file. Skips where namespaces cannot be made, which takes trying."""
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    gc.collect()  # what earlier tests have left to it is not to be closed meanwhile
    before, files = (_namespaces(), _children(), _devices()), _open_files()
    yield
    gc.collect()
    assert (_namespaces(), _children(), _devices()) == before
    assert _open_files() <= files


def _namespaces() -> set[str]:
    """This process's: others may test at the same time."""
    folder = Path("/run/netns")
    return {path.name for path in folder.glob(f"pycomm-{os.getpid()}-*")} if folder.exists() else set()


def _children() -> set[int]:
    """Ranks are among them: what starts them inside a namespace becomes them."""
    return set(child_processes())


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _devices() -> list[str]:
    """Of the namespace that the tests run in."""
    return sorted(os.listdir("/sys/class/net"))


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_stays")
def test_measures_a_link_as_slow_as_was_asked_for() -> None:
    """How close simulation comes is a figure of the bench; load makes it worse, but nothing beats the link's rate."""
    names, size = ("ring", "halving_doubling", "recursive_doubling"), 16 << 20
    with hosts(2, gigabits=1) as cluster:
        figures = measure(cluster, [size], rounds=3, names=names, curves=[1024], timeout=100)
    assert figures.network.per_host == 1
    seconds_at_rate = 8e-9 * size  # with 2 ranks each sends and receives as much as is summed, at least
    for name in names:
        assert figures.measured[size][name].median > 0.9 * seconds_at_rate
        assert figures.simulated(name, size) > 0.9 * seconds_at_rate


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_hosts_are_gone_after_an_exception(count: int, error: type[BaseException]) -> None:
    names: set[str] = set()

    def fail() -> None:
        with hosts(count, gigabits=0.1) as cluster:
            names.update(_namespaces())
            assert {host.name for host in cluster} <= names
            raise error

    with pytest.raises(error):
        fail()
    assert len(names) == count + (count != 2)  # a switch
    assert not _namespaces() & names


@pytest.mark.usefixtures("nothing_stays")
def test_hosts_that_cannot_be_made_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "_QUEUE_BYTES", -1)
    with pytest.raises(NamespaceError, match="tbf.*-1"):
        with hosts(3):
            raise AssertionError("not reached")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_stays")
def test_hosts_reach_each_other_and_nobody_else() -> None:
    with hosts(3, gigabits=None) as cluster:
        for host in cluster:
            output = subprocess.run(
                ["ip", "-n", host.name, "-o", "address"], capture_output=True, text=True, check=True
            ).stdout
            assert f"{host.address}/24" in output
        outputs = run_ranks(cluster, "bench.slow_network.link", ["--help"], per_host=2, timeout=60)
    assert len(outputs) == 6
    assert all("--gigabits" in output for output in outputs)


@pytest.mark.usefixtures("nothing_stays")
def test_a_rank_that_fails_ends_the_others() -> None:
    with hosts(2) as cluster:
        start = time.monotonic()
        with pytest.raises(RankError, match=r"rank [01] ended with status 1:[^$]*JSONDecodeError"):
            run_ranks(cluster, "bench.slow_network.link", ["rank", "{"], timeout=60)
        with pytest.raises(RankError, match="not done after 0.5 s: rank 0, 1"):
            run_ranks(cluster, "http.server", timeout=0.5)
        assert time.monotonic() - start < 30


@pytest.mark.parametrize("count", [0, -1, 1000])
def test_impossible_counts(count: int) -> None:
    with pytest.raises(ValueError, match=f"count is {count}, wanted 1 to"):
        with hosts(count):
            raise AssertionError("not reached")


@pytest.mark.parametrize("gigabits", [0, -1, 1e9, float("nan")])
def test_impossible_rates(gigabits: float) -> None:
    with pytest.raises(ValueError, match="gigabits is .*, wanted 0.0001 to 1000, or None"):
        with hosts(2, gigabits):
            raise AssertionError("not reached")


class TestAvailable:
    @pytest.fixture(autouse=True)
    def _asked_anew(self) -> Iterator[None]:
        available.cache_clear()
        yield
        available.cache_clear()

    def test_needs_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert available() == "network namespaces need root"

    @pytest.mark.parametrize("tool", ["ip", "tc"])
    def test_needs_iproute(self, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else f"/sbin/{name}")
        assert available() == f"{tool} is not installed (iproute2)"

    def test_says_what_the_kernel_said(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        refusing = tmp_path / "ip"
        refusing.write_text("#!/bin/sh\necho mount: Operation not permitted >&2\nexit 1\n")
        refusing.chmod(0o755)
        (tmp_path / "tc").symlink_to(refusing)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        reason = available()
        assert reason is not None
        assert reason.startswith(f"ip netns add pycomm-{os.getpid()}-")
        assert reason.endswith("-0: mount: Operation not permitted")
