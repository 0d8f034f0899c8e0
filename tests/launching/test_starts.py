"""Starts of a job by torchrun: the processes of one meet each other, whatever their agents count, and no others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from pycomm.tools.launching import PerRank, RankOutcome, store_of_start
from tests.on_ranks import Pools
from tests.processes import child_processes
from tests.ranks import SLOWER, free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "checkpoint.py"
Starts = Callable[..., list[RankOutcome]]


def come(port: int, rank: str, size: int, delay: float, timeout: float) -> list[int]:
    """Come as ``rank`` of a start after ``delay`` seconds; return the processes that have met there."""
    if rank == "-":
        return []
    time.sleep(delay)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    part = store_of_start(store, int(rank), size, timeout)
    part.set(rank, str(os.getpid()))
    part.wait([str(each) for each in range(size)])
    return [int(part.get(str(each))) for each in range(size)]


@pytest.fixture
def starts(rank_pools: Pools) -> Starts:
    """Let three processes come as ``ranks`` says, "-" for those that do not, after ``delays``; all into one store."""
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pool = rank_pools(3)

    def start(ranks: str, *delays: float, size: int = 0, timeout: float = 20.0) -> list[RankOutcome]:
        size, delays = size or 3 - ranks.count("-"), delays or (0.0, 0.0, 0.0)
        return pool.outcomes(come, agent.port, PerRank(list(ranks)), size, PerRank(list(delays)), timeout * SLOWER)

    return start


def text(outcome: RankOutcome) -> str:
    return f"{type(outcome.error).__name__}: {outcome.error}"


def test_each_start_meets_in_a_part_of_its_own(starts: Starts) -> None:
    """In any order, and on any number of ranks. Else a process would find those of before, as here their ids."""
    for ranks, *delays in (
        ("012", 0.0, 0.0, 0.0),
        ("201", 0.0, 0.3, 0.1),
        ("1-0", 0.0, 0.0, 0.3),
        ("120", 0.0, 0.1, 0.3),
    ):
        met = [outcome.result for outcome in starts(ranks, *delays)]
        pids = sorted(((rank, met[place][int(rank)]) for place, rank in enumerate(ranks) if rank != "-"))
        assert len({pid for _, pid in pids}) == len(pids)
        assert all(each == [pid for _, pid in pids] for each, rank in zip(met, ranks, strict=True) if rank != "-")


def test_a_process_of_an_older_start_gets_an_error(starts: Starts) -> None:
    rank_0, *_ = starts("0--", size=3, timeout=0.2)
    assert text(rank_0) == "TimeoutError: ranks [1, 2] of 3 have not come to start 1 of the job in 0.2 s"
    _, rank_1, _ = starts("-1-", size=3, timeout=0.2)
    assert text(rank_1).endswith("ranks of start 1, the last one, are missing, which rank 0 names")
    # Whoever has come to start 1 is no hindrance. The first of two processes as rank 1 is of a start that never was.
    older, rank_0, newer = starts("101", 0.0, 0.6, 0.3, size=2)
    assert newer.result == rank_0.result != []
    assert re.match(
        r"RuntimeError: start 2 .* another process as rank 1, which came later: .* older start", text(older)
    )
    (late,) = [text(each) for each in starts("-1-", size=2, timeout=0.2) if each.error is not None]
    assert re.match("TimeoutError: rank 1 of 2 has waited 0.2 s .*: start 2, .* has begun without this process", late)
    overtaken, rank_0, other = starts("001", 0.0, 0.5, 0.5, size=2)
    assert text(overtaken).endswith("rank 0, belongs to start 3 of its job, but a later one has begun")
    assert rank_0.result == other.result != []


class Agents:
    """Two agents of torchrun with one process each, as on two hosts, that run the example."""

    def __init__(self, folder: Path, nodes: str, store: dict[str, str]) -> None:
        self._folder = folder
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **store}
        rendezvous = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-id {folder.name}"
        options = f"--nnodes {nodes} --nproc-per-node 1 --max-restarts 3 {rendezvous}"
        script = [str(EXAMPLE), "--steps", "100000", "--folder", str(folder / "run")]
        self._command = [sys.executable, "-m", "torch.distributed.run", *options.split(), *script]
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with (self._folder / "output").open("a") as out:
            self.agents.append(subprocess.Popen(self._command, env=self._environment, stdout=out, stderr=out))

    def kill(self, number: int, *, agent: bool = False) -> None:
        """Kill the process of an agent, and with ``agent`` the agent before."""
        workers = child_processes(parent=self.agents[number].pid)
        if agent:
            self.agents[number].kill()
            self.agents[number].wait()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)

    def await_resumed(self, ranks: int, times: int = 1) -> None:
        self._await(lambda: self._output_so_far().count(f"on {ranks} ranks") >= times)

    def await_progress(self) -> None:
        """Wait for a checkpoint that was not there before."""
        last = self._last_checkpoint()
        self._await(lambda: self._last_checkpoint() > last)

    def _last_checkpoint(self) -> str:
        return max((path.name for path in (self._folder / "run").glob("checkpoint-*")), default="")

    def _await(self, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + 100 * SLOWER
        while not holds():
            assert time.monotonic() < until, self._output_so_far()
            time.sleep(0.2)

    def _output_so_far(self) -> str:
        return (self._folder / "output").read_text(errors="replace")


@contextmanager
def two_agents(folder: Path, nodes: str, store: dict[str, str]) -> Iterator[Agents]:
    pytest.importorskip("sklearn")
    made = Agents(folder, nodes, store)
    made.start()
    try:
        yield made
    finally:
        for agent in made.agents:
            agent.terminate()  # it ends its process
        for agent in made.agents:
            agent.wait(60 * SLOWER)


@pytest.mark.slow
@pytest.mark.timeout(400 * SLOWER)
def test_a_process_is_killed_beside_another_agent(tmp_path: Path) -> None:
    with two_agents(tmp_path, "2", {}) as run:
        run.start()
        for number, killed in enumerate((1, 0), start=1):
            run.await_progress()
            run.kill(killed)
            run.await_resumed(2, number)


@pytest.mark.slow
@pytest.mark.timeout(400 * SLOWER)
def test_an_agent_leaves_and_one_comes_later(tmp_path: Path) -> None:
    """Which torch permits only if it does not share its own store, as docs/checkpoints.md says."""
    with two_agents(tmp_path, "1:2", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}) as run:
        run.await_progress()
        run.start()
        run.await_resumed(2)
        run.kill(1, agent=True)
        run.await_resumed(1)
        run.start()
        run.await_resumed(2, 2)
