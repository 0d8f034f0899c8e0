"""The tests' own helper that finds child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.processes import child_processes


def test_children_of_every_thread_are_found() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

    start()
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    try:
        found = child_processes()
        assert all("input()" in found[process.pid] for process in started)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert not {process.pid for process in started} & set(child_processes())


def test_a_kernel_without_lists_of_children(tmp_path: Path) -> None:
    """Names with parentheses, a process of another parent, one that has gone, and what is no process."""
    for name, stat in {
        "10": f"10 (a) b) S {os.getpid()} 10 10",
        "11": f"11 (x) S 1 {os.getpid()} 11",
        "12": f"12 (gone) Z {os.getpid()} 12 12",
        "self": f"13 (y) S {os.getpid()} 1 1",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "stat").write_text(stat)
    (tmp_path / "14").mkdir()
    (tmp_path / "10" / "cmdline").write_text("python")
    assert child_processes(tmp_path) == {10: "python", 12: ""}
