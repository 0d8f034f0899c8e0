"""Reading of what the system says about processes and memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pycomm._native as _native


def test_states_of_processes() -> None:
    assert _native.process_state(os.getpid()) == "alive"
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    assert _native.process_state(child) == "stopped"
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert _native.process_state(child) == "dead"
    os.waitpid(child, 0)
    assert _native.process_state(child) == "dead"
    assert _native.process_state(0) == "unknown"


Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a file below ``tmp_path``."""

    def write_below(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write_below


def test_memory_of_control_groups_of_both_versions(tmp_path: Path, write: Write) -> None:
    """The least of all limits on the way up counts; what the page cache could give back is free."""
    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:  8000 kB\n")
    root = str(tmp_path)
    assert _native.available_memory(root) == 8000 * 1024
    write("proc/self/cgroup", "12:cpu,cpuacct:/a\n5:memory:/docker/abc\n1:name=systemd:/x\n")
    write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "5000000")
    write("sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", "3000000")
    write("sys/fs/cgroup/memory/docker/abc/memory.stat", "cache 5\ntotal_inactive_file 500000\n")
    assert _native.available_memory(root) == 2_500_000
    write("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "4000000")
    write("sys/fs/cgroup/memory/docker/memory.usage_in_bytes", "3000000")
    assert _native.available_memory(root) == 1_000_000
    write("proc/self/cgroup", "0::/user/job\n")
    write("sys/fs/cgroup/user/job/memory.max", "max")
    write("sys/fs/cgroup/user/job/memory.current", "1000")
    write("sys/fs/cgroup/user/memory.max", "3000")
    write("sys/fs/cgroup/user/memory.current", "2000")
    assert _native.available_memory(root) == 1000


def core_of_this_thread() -> int:
    return int(Path("/proc/thread-self/stat").read_text().rpartition(") ")[2].split()[36])


@pytest.fixture
def on_cores() -> Iterator[Callable[[set[int]], int]]:
    """Return a function that starts an idle process, which may use those cores only, and returns its id."""
    started = []

    def start(cores: set[int]) -> int:
        idle = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        started.append(idle)
        os.sched_setaffinity(idle.pid, cores)
        return idle.pid

    before = os.sched_getaffinity(0)
    yield start
    os.sched_setaffinity(0, before)
    for each in started:
        each.kill()
        each.wait()


def test_processes_with_a_core_each(on_cores: Callable[[set[int]], int]) -> None:
    usable = sorted(os.sched_getaffinity(0))
    same = [on_cores(set(usable)) for _ in usable[1:]]
    assert _native.have_a_core_each(same), "as many processes as cores, this one among them"
    assert _native.have_a_core_each([0 for _ in usable[1:]]), "what cannot be looked at is like this one"
    assert not _native.have_a_core_each([*same, on_cores(set(usable))])
    assert not _native.have_a_core_each([*same, 0])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="wants two cores")
def test_pinned_processes_with_a_core_each(on_cores: Callable[[set[int]], int]) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    on_first, on_either = on_cores({first}), on_cores({first, second})
    os.sched_setaffinity(0, {second})
    assert _native.have_a_core_each([on_first])
    assert not _native.have_a_core_each([on_first, on_either])
    os.sched_setaffinity(0, {first})
    assert not _native.have_a_core_each([on_first])
    assert _native.have_a_core_each([on_either]), "which has to move"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="wants two cores")
def test_a_thread_leaves_its_core_and_keeps_its_affinity() -> None:
    before = os.sched_getaffinity(0)
    times_it_left = 0
    for _ in range(20):
        core = core_of_this_thread()
        _native.leave_this_core()
        times_it_left += core_of_this_thread() != core
        assert os.sched_getaffinity(0) == before
    assert times_it_left > 10, "on busy cores the scheduler may bring it back at once, but not as a rule"


def test_a_thread_with_one_core_stays(on_cores: Callable[[set[int]], int]) -> None:
    only = {max(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, only)
    _native.leave_this_core()
    assert os.sched_getaffinity(0) == only
    assert core_of_this_thread() in only


def test_cores_of_control_groups_of_both_versions(tmp_path: Path, write: Write) -> None:
    """A limit of time counts for the processes in that group, or below it; affinities allow this one alone."""
    root = str(tmp_path)
    assert _native.have_a_core_each([], root)
    write("proc/self/cgroup", "5:memory:/a\n4:cpu,cpuacct:/job/1\n")
    write("sys/fs/cgroup/cpu/job/1/cpu.cfs_quota_us", "-1")
    write("sys/fs/cgroup/cpu/job/1/cpu.cfs_period_us", "100000")
    assert _native.have_a_core_each([], root)
    write("sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "50000")
    write("sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    assert not _native.have_a_core_each([], root), "half a core for one process"
    write("proc/self/cgroup", "0::/job/2\n")
    write("sys/fs/cgroup/job/2/cpu.max", "max 100000")
    assert _native.have_a_core_each([], root)
    write("sys/fs/cgroup/job/cpu.max", "90000 100000")
    assert not _native.have_a_core_each([], root)
    write("sys/fs/cgroup/job/cpu.max", "100000 100000")
    assert _native.have_a_core_each([], root)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="wants two cores")
def test_who_is_in_the_limited_control_group(tmp_path: Path, write: Write) -> None:
    root = str(tmp_path)
    write("proc/self/cgroup", "0::/job\n")
    write("sys/fs/cgroup/job/cpu.max", "150000 100000")
    write("proc/12345678/cgroup", "0::/other\n")
    assert _native.have_a_core_each([12345678], root), "the other one is not in it"
    write("proc/12345678/cgroup", "0::/job/below\n")
    assert not _native.have_a_core_each([12345678], root)
