"""Signs of life of the ranks, as far as the operating system shows them to this one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pycomm._native as _native
from pycomm.communicator import Communicator
from pycomm.transport.rendezvous import host_identity

STOPPED_PATIENCE = 0.5
"""Seconds for which a process may be stopped before it is left behind."""

_FATES = {"dead": "died", "dumping core": "is dumping core"}


def _start_of(pid: int) -> int:
    """Return when a process began, in the kernel's ticks, which tells it from a later one with its id; 0 if gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


class Vitals:
    """Processes of ranks, by which it is known whether those of this host are alive."""

    def __init__(self) -> None:
        self._processes: dict[int, tuple[int, int]] = {}  # of the ranks on this host: id and start
        self._stopped: dict[int, float] = {}

    def meet(self, communicator: Communicator, ranks: Iterable[int]) -> None:
        """Learn the processes of ``ranks``, by which the communicator's are called here. Collective."""
        mine = {"host": host_identity(), "pid": os.getpid(), "start": _start_of(os.getpid())}
        everyones = [json.loads(text) for text in communicator.channel.all_gather_bytes(json.dumps(mine).encode())]
        self._processes = {
            rank: (process["pid"], process["start"])
            for rank, process in zip(ranks, everyones, strict=True)
            if process["host"] == mine["host"]
        }

    def fate_of(self, rank: int) -> str | None:
        """Return what has become of ``rank``, if it can no longer take part; ``None`` if it can, for all one knows."""
        if rank not in self._processes:
            return None
        pid, start = self._processes[rank]
        state = _native.process_state(pid)
        if state != "stopped":
            self._stopped.pop(rank, None)
        elif time.monotonic() - self._stopped.setdefault(rank, time.monotonic()) > STOPPED_PATIENCE:
            return "is stopped"
        if state == "alive" and _start_of(pid) != start:
            return "died"
        return _FATES.get(state)
