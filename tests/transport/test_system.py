"""Reading of what the system says about processes and memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    """The least of all limits on the way up counts; what the page cache could give back is free."""

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

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
