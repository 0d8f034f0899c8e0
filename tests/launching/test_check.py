"""``torchrun ... -m pycomm.check``: what it finds wrong, and how it ends."""

from __future__ import annotations

import copy
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from bench.slow_network.namespaces import available, hosts, run_ranks
from pycomm.tools.check.board import AbsentError, NoticeBoard
from pycomm.tools.check.facts import Facts, facts_of, findings_of, with_distinct_hosts
from pycomm.tools.check.links import HostLink, findings_of_links, links_of, rounds_of
from pycomm.tools.launching import RankError
from tests.ranks import free_port
from tests.test_listening import kinds, listening, row_of, watched


def check(rank: int, size: int, port: int, *words: str, **variables: str) -> subprocess.Popen[str]:
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    return subprocess.Popen(
        [sys.executable, "-m", "pycomm.check", *words],
        env={**os.environ, "LOCAL_WORLD_SIZE": str(size), **environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_two_ranks_of_this_host() -> None:
    port = free_port()
    first, second = map(ended, [check(rank, 2, port, "--parameters", "1M") for rank in range(2)])
    assert first[0] == second[0] == 0, first
    assert second[1] == ""
    lines = first[1].splitlines()
    assert lines[0] == "2 ranks on 1 host"
    assert lines[-1] == "Nothing here would stop a job."
    assert "attach: transport 'shared_memory'" in lines
    assert re.search(r"averaging the gradients of 1 M .* takes .* by pycomm, .* by gloo \(.*x\)", first[1])
    assert re.search(r'compression="auto" would choose \w+: ', first[1])


def test_a_rank_that_never_comes() -> None:
    code, _, err = ended(check(0, 3, free_port(), "--timeout", "1"))
    assert code == 1
    assert err.splitlines()[-1] == ("error: ranks 1, 2 of 3 did not come to this step of the check within 1 s: facts")
    code, _, err = ended(check(1, 2, port := free_port(), "--timeout", "1"))
    assert code == 1
    assert f"error: rank 1 cannot reach the store at 127.0.0.1:{port} within 1 s: " in err


def test_not_by_torchrun() -> None:
    bare = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-m", "pycomm.check"]
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    line = "pycomm.check: RANK is not set: start it as the job, torchrun ... -m pycomm.check"
    assert done.stderr.splitlines()[-1] == line


@pytest.fixture(scope="module")
def fact() -> Facts:
    return facts_of(0, "127.0.0.1", 1)


def cluster(fact: Facts, identities: str, **first: Any) -> list[Facts]:
    """Return facts of ranks on hosts of these letters; ``first`` changes those of rank 0."""
    found = []
    for rank, letter in enumerate(identities):
        facts = {**copy.deepcopy(fact), "rank": rank, "host": letter, "identity": letter}
        found.append(
            {**facts, "address": f"10.0.0.{ord(letter)}", "interface": "eth0", "mtu": 1500, "cores": 64, "settings": {}}
        )
    found[0] |= first
    return found


def test_nothing_is_wrong(fact: Facts) -> None:
    assert findings_of(cluster(fact, "AABB", threads=1), 1e6) == []


CASES: list[tuple[str, dict[str, Any], bool, str]] = [
    ("AB", {"versions": {"pycomm": "9"}}, True, "pycomm differs: 9 (rank 0 on A), "),
    ("AB", {"missing": ["ib7"]}, True, "GLOO_SOCKET_IFNAME names ib7, which A does not have"),
    ("AB", {"problem": "node7 cannot be reached: unknown"}, True, "A: node7 cannot be reached"),
    ("AB", {"address": "127.0.1.1"}, True, "A would give others the address 127.0.1.1, at which they reach themselves"),
    ("AB", {"mtu": 9000}, False, "the MTU differs: 9000 (A), 1500 (B)"),
    ("AB", {"settings": {"PYCOMM_X": "1"}}, False, "PYCOMM_X differs: 1 (rank 0 on A), not set (rank 1 on B)"),
    ("AB", {"descriptors": 100}, True, "rank 0 on A may open 100 files, wanted 144 for 2 ranks"),
    ("AABB", {"shares_memory": False}, False, "A forbids memory that processes share"),
    ("AB", {"memory": 1 << 20}, True, "A has 1.05 MB of memory left. 1 rank of this model take about 11.2 MB"),
    ("AABB", {"cores": 1}, False, "2 ranks of A share 1 core"),
    ("AABB", {"cores": 8, "threads": 8}, False, "2 ranks of A compute with 8 threads each on 8 cores"),
    ("AAB", {"threads": 1}, False, "hosts have different numbers of ranks: 1, 2"),
    ("AABB", {"torch_gpus": 1, "gpus": 1, "nccl": "2.30"}, True, "A has 1 GPU for 2 ranks"),
    (
        "AB",
        {"torch_gpus": 1, "gpus": 0, "nccl": "2", "why_no_gpu": "old"},
        True,
        "pycomm's kernels cannot use the GPUs",
    ),
    ("AB", {"torch_gpus": 1, "gpus": 1, "nccl": None}, True, "A has GPUs, and no NCCL was found"),
]


@pytest.mark.parametrize(("identities", "first", "is_fatal", "says"), CASES, ids=lambda case: str(case)[:30])
def test_findings(fact: Facts, identities: str, first: dict[str, Any], is_fatal: bool, says: str) -> None:
    facts = cluster(fact, identities)
    if "versions" in first:
        first = {"versions": {**fact["versions"], **first["versions"]}}
    facts[0] |= {"threads": 1, **first}
    found = findings_of(facts, 1e6)
    assert [(finding.is_fatal, finding.what.startswith(says)) for finding in found] == [(is_fatal, True)], found
    assert all(finding.remedy for finding in found)


def test_hosts_of_one_name(fact: Facts) -> None:
    facts = [{**each, "host": "box"} for each in cluster(fact, "AABC")]
    facts[3]["host"] = "other"
    names = [each["host"] for each in with_distinct_hosts(facts)]
    assert names == ["box (10.0.0.65)", "box (10.0.0.65)", "box (10.0.0.66)", "other"]


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9])
def test_rounds(count: int) -> None:
    rounds = list(rounds_of(count))
    assert sorted(pair for pairs in rounds for pair in pairs) == [
        (a, b) for a in range(count) for b in range(a + 1, count)
    ]
    for pairs in rounds:
        members = [one for pair in pairs for one in pair]
        assert len(members) == len(set(members))


def on_threads(facts: Sequence[Facts], job: Callable[[NoticeBoard], Any], timeout: float = 20.0) -> list[Any]:
    """Call ``job`` with the board of each rank, each on a thread of its own; return results or errors."""
    store = HashStore()

    def call(rank: int) -> Any:
        try:
            return job(NoticeBoard(store, rank, len(facts), timeout))
        except AbsentError as error:
            return str(error)

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(call, range(len(facts))))


def at_loopback(fact: Facts, identities: str) -> list[Facts]:
    return [{**facts, "address": "127.0.0.1"} for facts in cluster(fact, identities)]


def test_links_are_measured(fact: Facts) -> None:
    facts = at_loopback(fact, "AABCC")
    before, threads = listening(), threading.active_count()
    with watched() as found:
        everyones = on_threads(facts, lambda board: links_of(board, facts))
    assert row_of("`python -m pycomm.check`")[0].startswith("TCP while it measures links")
    assert kinds(found) == {"TCP 127.0.0.1"}
    assert listening() <= before
    links = everyones[0]
    assert all(each == links for each in everyones)
    assert sorted((link.host, link.peer) for link in links) == [(a, b) for a in "ABC" for b in "ABC" if a != b]
    measured = [link for link in links if link.sent > 0]
    assert sorted((link.host, link.peer) for link in measured) == [("A", "B"), ("A", "C"), ("B", "C")]
    assert all(link.received > 0 and link.latency > 0 and not link.error for link in measured)
    assert all(link.together.keys() == {2, 4, 8} and min(link.together.values()) > 0 for link in measured)
    assert findings_of_links([HostLink("A", "B"), HostLink("B", "A")]) == []
    for _ in range(200):  # they end when the other side does
        if threading.active_count() <= threads:
            break
        time.sleep(0.05)
    assert threading.active_count() <= threads


def test_a_host_that_cannot_be_reached(fact: Facts) -> None:
    """Nothing listens where B says, as where a firewall refuses."""
    facts = at_loopback(fact, "AB")
    with socket.create_server(("127.0.0.2", 0)):
        theirs = [facts[0], {**facts[1], "address": "127.0.0.2"}]

        def job(board: NoticeBoard) -> Any:
            return links_of(board, facts if board.rank == 1 else theirs)

        links, _ = on_threads(facts, job)
    failed = [link for link in links if link.error]
    assert [(link.host, link.peer) for link in failed] == [("A", "B")]
    (finding,) = findings_of_links(links)
    assert re.match(r"error: A cannot connect to B: Connection refused \(127\.0\.0\.2:\d+\)\. Open TCP", str(finding))


def test_a_leader_that_leaves(fact: Facts) -> None:
    facts = at_loopback(fact, "AB")
    links, _ = on_threads(facts, lambda board: links_of(board, facts) if board.rank == 0 else None, timeout=0.5)
    assert links == "rank 1 of 2 did not come to this step of the check within 0.5 s: ports"


def test_what_is_said_of_links() -> None:
    links = [HostLink("A", "B", mtu=1500, sent=1e9, received=1e9), HostLink("A", "C", mtu=1400, sent=1e9, received=1e9)]
    links.append(HostLink("B", "C", mtu=1500, sent=1e9, received=1e7))
    mtu, slow = findings_of_links(links)
    assert mtu.what == "paths between hosts have MTUs from 1400 to 1500"
    assert slow.what == "the link of B and C has 80 Mbit/s, the median of all is 8 Gbit/s"


def test_what_is_said_of_several_connections() -> None:
    def said(*rates: float) -> list[str]:
        together = dict(zip((2, 4, 8), rates, strict=True))
        links = [HostLink("A", "B", sent=1e9, received=1e9, together=together)] * 3
        return [str(finding) for finding in findings_of_links(links)]

    assert said(1.1e9, 1.2e9, 1.3e9) == []
    (finding,) = said(2e9, 3.9e9, 4e9)
    assert "4 connections between two hosts together send 3.9 times as fast as one. Set PYCOMM_STREAMS=4" in finding


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_three_hosts_of_which_two_do_not_reach_each_other() -> None:
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    with hosts(3, gigabits=1) as made:
        said, *others = run_ranks(made, "pycomm.check", ["--timeout", "20"], per_host=2, timeout=80)
        assert others == [""] * 5
        assert "6 ranks on 3 hosts" in said
        assert "attach: transport 'hierarchical'" in said
        route = ["ip", "route", "add", "blackhole", f"{made[1].address}/32"]
        subprocess.run(["ip", "netns", "exec", made[2].name, *route], check=True, timeout=20)
        with pytest.raises(RankError, match=r"error: .* cannot connect to .*\n(.*\n)*A job would fail: 2 errors\."):
            run_ranks(made, "pycomm.check", ["--timeout", "20"], timeout=80)
