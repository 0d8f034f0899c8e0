"""Other work beside a bench."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import ROOT
from bench.harness.busy import busy
from tests.bench.test_nccl_tests import NCCL_TESTS
from tests.cli.bench.running import bench

pytestmark = pytest.mark.timeout(60)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Return whether there is such a process that has not ended, whether or not anybody has taken note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_processes_compute_until_the_block_ends() -> None:
    with busy(2, 7) as pids:
        assert len(pids) == 2
        before = [cpu_seconds(pid) for pid in pids]
        deadline = time.monotonic() + 30
        while not all(cpu_seconds(pid) > seconds for pid, seconds in zip(pids, before, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids] == [min(19, niceness + 7)] * 2
    assert not any(is_running(pid) for pid in pids)


def test_none() -> None:
    with busy(0, 0) as pids:
        assert pids == []


def test_they_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = f"import sys; sys.path.append({str(ROOT)!r})\nfrom bench.harness.busy import busy\n"
    script += "with busy(1, 0) as pids:\n print(*pids, flush=True); input()"
    pipe, command = subprocess.PIPE, [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_bench_says_so_and_leaves_nothing() -> None:
    code, printed, errors = bench("barrier", "--busy", "1", "--nice", "10", cwd=ROOT, command=NCCL_TESTS)
    assert code == 0, errors
    assert "# busy processes beside it: 1, niceness 10" in printed
