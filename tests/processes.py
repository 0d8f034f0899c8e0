"""Processes that this one has started."""

from __future__ import annotations

import os
from pathlib import Path


def child_processes(proc: Path = Path("/proc"), parent: int | None = None) -> dict[int, str]:
    """Return the command lines of this process's, or ``parent``'s, children by their ids; empty for zombies.

    This reads every process's ``stat``: not every kernel is configured to list a thread's children.
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
    """Return the text, empty if the process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
