"""Signs of life of the ranks, as far as the operating system shows them to this one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

from pycomm.communicator import Communicator
from pycomm.transport import processes
from pycomm.transport.rendezvous import host_identity

STOPPED_PATIENCE = 0.5
"""Seconds for which a process may be stopped before it is left behind."""

_STOPPED = "is stopped"


class Vitals:
    """Processes of ranks, by which it is known whether those of this host are alive."""

    def __init__(self) -> None:
        self._processes: dict[int, tuple[int, int]] = {}  # of the ranks on this host: id and start
        self._stopped: dict[int, float] = {}

    def meet(self, communicator: Communicator, ranks: Iterable[int]) -> None:
        """Learn the processes of ``ranks``, by which the communicator's are called here. Collective."""
        mine = {"host": host_identity(), "pid": os.getpid(), "start": processes.start_of(os.getpid())}
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
        fate = processes.fate_of(pid)
        if fate != _STOPPED:
            self._stopped.pop(rank, None)
            return fate or (None if processes.start_of(pid) == start else "died")
        since = self._stopped.setdefault(rank, time.monotonic())
        return fate if time.monotonic() - since > STOPPED_PATIENCE else None
