"""Processes that this one has started."""

from __future__ import annotations

import os
from pathlib import Path


def child_processes(proc: Path = Path("/proc"), parent: int | None = None) -> dict[int, str]:
    """Return the command lines of this process's children, or ``parent``'s, by their ids, that of a zombie empty.

    Read from every process's ``stat``: the kernel has a list of a thread's children only if it was configured to.
    """
    parent = os.getpid() if parent is None else parent
    return {
        int(folder.name): _read(folder / "cmdline")
        for folder in proc.iterdir()
        if folder.name.isdecimal() and _parent(_read(folder / "stat")) == parent
    }


def _parent(stat: str) -> int | None:
    """Return the parent's id from "id (name) state parent ..."; the name may hold anything, parentheses too."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[1]) if fields else None


def _read(path: Path) -> str:
    """Return the text, empty if the process has gone meanwhile."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
