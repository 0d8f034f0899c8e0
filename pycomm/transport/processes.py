"""Processes of ranks on this host, as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pycomm._native as _native

_FATES = {"dead": "died", "stopped": "is stopped", "dumping core": "is dumping core"}


def fate_of(pid: int) -> str:
    """Return what keeps process ``pid`` from going on: "died", "is stopped", "is dumping core"; empty if nothing."""
    return "" if pid == os.getpid() else _FATES.get(_native.process_state(pid), "")


def start_of(pid: int) -> int:
    """Return when a process began, in the kernel's ticks, which tells it from a later one with its id; 0 if gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
