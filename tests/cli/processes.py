"""Looking after the processes that a test's command started."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def members_of_session(session: int) -> list[int]:
    """Pids in ``session``, the oldest first: a rank is older than the next one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # has ended meanwhile
            state, its_session, started = fields[0], int(fields[3]), int(fields[19])
            if its_session == session and state != "Z":
                found.append((started, int(entry.name)))
    return [pid for _, pid in sorted(found)]


def ranks_of_session(session: int) -> list[int]:
    """Pids of the ranks among them, by rank."""
    return [pid for pid in members_of_session(session) if b"spawn_main" in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def left_behind(session: int, patience: float) -> list[int]:
    """Pids that are still there after ``patience`` seconds; they are killed then."""
    deadline = time.monotonic() + patience
    while (left := members_of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left
