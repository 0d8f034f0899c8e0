"""Things that the processes of a group may leave behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

_MARK = "PYCOMM_CHAOS"
_PATIENCE = 5.0  # seconds, for what is about to end


def mark_descendants() -> None:
    """Let the processes that come from this one from now on be known by their environment, whoever adopts them."""
    os.environ[_MARK] = secrets.token_hex(8)


class Leftovers:
    """Snapshot taken before a group starts; what :meth:`found` finds on top of it is the group's."""

    def __init__(self) -> None:
        self._family = _family()
        self._sockets = set(_abstract_sockets())

    def found(self, pids: list[int]) -> list[str]:
        """Return what the group, whose ranks were ``pids``, has left behind after a while; end such processes."""
        deadline = time.monotonic() + _PATIENCE
        while (left := self._look(pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in _family() - self._family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _look(self, pids: list[int]) -> list[str]:
        left = [f"process {pid}" for pid in sorted(_family() - self._family)]
        for path in Path("/dev/shm").iterdir():
            if path.name.startswith(("pycomm", *[f"torch_{pid}_" for pid in pids])):
                left.append(str(path))
        sockets = {inode: name for inode, name in _abstract_sockets().items() if inode not in self._sockets}
        if sockets:
            others = _inodes_of_others(self._family | {os.getpid()})
            left += [f"socket {name}" for inode, name in sockets.items() if inode not in others]
        return left


def _family() -> set[int]:
    """The processes that come from this one: by the mark they carry, or, if they are dead, by their parents."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    parents: dict[int, int] = {}
    marked = set()
    for pid in _processes():
        with contextlib.suppress(OSError):
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                marked.add(pid)
    marked.add(os.getpid())
    return {pid for pid, parent in parents.items() if pid in marked or parent in marked} - {os.getpid()}


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _abstract_sockets() -> dict[str, str]:
    """The names in the abstract namespace that are pycomm's, by inode."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()]
    return {row[6]: row[7] for row in rows if len(row) > 7 and row[7].startswith("@pycomm")}


def _inodes_of_others(family: set[int]) -> set[str]:
    """Sockets of processes that have nothing to do with this one: other tests run on this machine, too."""
    found = set()
    for pid in set(_processes()) - family - _family():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    link = os.readlink(entry)
                    if link.startswith("socket:["):
                        found.add(link.removeprefix("socket:[").removesuffix("]"))
    return found
