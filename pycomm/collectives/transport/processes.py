"""Processes of ranks on this host, as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pycomm._native as _native

_FATES = {"dead": "died", "stopped": "is stopped", "dumping core": "is dumping core"}


def fate_of(pid: int) -> str:
    """Return why process ``pid`` does not run: "died", "is stopped", "is dumping core"; empty if it does."""
    return "" if pid == os.getpid() else _FATES.get(_native.process_state(pid), "")


def start_of(pid: int) -> int:
    """Return a process's start in kernel ticks, which distinguishes it from later ones with its id; 0 if it ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
