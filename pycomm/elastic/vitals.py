"""Signs of life of the ranks, as far as the operating system shows them to this one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any

from pycomm.communicator import Communicator
from pycomm.transport import processes, rendezvous

STOPPED_PATIENCE = 0.5
"""Seconds for which a process may be stopped before it is left behind."""

_STOPPED = "is stopped"

Process = dict[str, Any]
"""Process of a rank: its ``host``, ``pid`` and ``start``, by which it is told from a later one with its id."""


def this_process() -> Process:
    """Return this process."""
    return {"host": rendezvous.host_identity(), "pid": os.getpid(), "start": processes.start_of(os.getpid())}


class Vitals:
    """Processes of ranks, by which it is known whether those of this host are alive.

    Attributes:
        processes: of each rank, by its number.
    """

    def __init__(self) -> None:
        self._here = rendezvous.host_identity()
        self.processes: dict[int, Process] = {}
        self._stopped: dict[int, float] = {}

    def meet(self, communicator: Communicator, ranks: Iterable[int]) -> None:
        """Learn the processes of ``ranks``, by which the communicator's are called here. Collective."""
        everyones = communicator.channel.all_gather_bytes(json.dumps(this_process()).encode())
        self.processes = {rank: json.loads(text) for rank, text in zip(ranks, everyones, strict=True)}

    def sees(self, rank: int) -> bool:
        """Return whether ``rank`` is on this host."""
        return rank in self.processes and self.processes[rank]["host"] == self._here

    def fate_of(self, rank: int) -> str | None:
        """Return what has become of ``rank``, if it can no longer take part; ``None`` if it can, for all one knows."""
        if not self.sees(rank):
            return None
        process = self.processes[rank]
        fate = processes.fate_of(process["pid"])
        if fate != _STOPPED:
            self._stopped.pop(rank, None)
            return fate or (None if processes.start_of(process["pid"]) == process["start"] else "died")
        since = self._stopped.setdefault(rank, time.monotonic())
        return fate if time.monotonic() - since > STOPPED_PATIENCE else None
