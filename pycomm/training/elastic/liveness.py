"""Liveness of ranks: by the operating system on this host, by a heartbeat thread on other hosts.

A rank whose operation failed calls the others through the agreement's store. A rank that is computing would notice
this only at its next operation, so a thread of each rank polls for calls and answers them. A rank that does not answer
has died, is stopped, or cannot be reached.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

from pycomm import threads
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.transport import processes, rendezvous
from pycomm.torch_internals import PrefixStore, Store
from pycomm.untrusted import COUNT, PROCESS_ID, parse

STOPPED_PATIENCE = 0.5
"""Seconds for which a process may be stopped before its rank is excluded."""

_STOPPED = "is stopped"

Process = dict[str, Any]
"""Process of a rank: ``host``, ``pid`` and start time ``start``, which tells processes of equal ids apart."""
PROCESS = {"host": str, "pid": PROCESS_ID, "start": COUNT}
"""Shape of a :data:`Process` in a message."""


def this_process() -> Process:
    return {"host": rendezvous.host_identity(), "pid": os.getpid(), "start": processes.start_of(os.getpid())}


class ProcessWatch:
    """Watch over the processes of ranks, which detects deaths on this host.

    Attributes:
        processes: process of each rank, by its number.
    """

    def __init__(self) -> None:
        self._here = rendezvous.host_identity()
        self.processes: dict[int, Process] = {}
        self._stopped: dict[int, float] = {}

    def meet(self, communicator: Communicator, ranks: Iterable[int]) -> None:
        """Exchange the processes of ``ranks``, the numbers of the communicator's ranks. Collective."""
        everyones = communicator.channel.all_gather_bytes(json.dumps(this_process()).encode())
        self.processes = {
            rank: parse(text, PROCESS, f"rank {rank}'s process") for rank, text in zip(ranks, everyones, strict=True)
        }

    def sees(self, rank: int) -> bool:
        """Return whether ``rank`` is on this host."""
        return rank in self.processes and self.processes[rank]["host"] == self._here

    def fate_of(self, rank: int) -> str | None:
        """Return why ``rank`` can no longer take part; ``None`` if it is alive or on another host."""
        if not self.sees(rank):
            return None
        process = self.processes[rank]
        fate = processes.fate_of(process["pid"])
        if fate != _STOPPED:
            self._stopped.pop(rank, None)
            return fate or (None if processes.start_of(process["pid"]) == process["start"] else "died")
        since = self._stopped.setdefault(rank, time.monotonic())
        return fate if time.monotonic() - since > STOPPED_PATIENCE else None


PATIENCE = 3.0
"""Seconds after which a rank that does not answer a call is excluded."""

_INTERVAL = 0.25  # seconds between two looks, for a few ranks
_LOOKS_PER_SECOND = 500.0  # by all ranks together, a load that one store can answer


class Heartbeat:
    """Thread of rank ``me``, one of ``size``, that answers calls in ``store``."""

    def __init__(self, store: Store, me: int, size: int) -> None:
        self._store, self._me = store, me
        self._interval = max(_INTERVAL, size / _LOOKS_PER_SECOND)
        self.patience = PATIENCE + 2 * self._interval
        self._round = 1
        self._stopped = threading.Event()
        threads.start(self._run, f"pycomm-heartbeat-{me}", self.stop)

    def expect(self, number: int) -> None:
        """Start to answer calls of round ``number``."""
        self._round = number

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()

    def _run(self) -> None:
        answered = 0
        while not self._stopped.wait(self._interval):
            number = self._round
            if number == answered:
                continue
            try:
                if is_called(self._store, number):
                    round_store(self._store, number).set(f"alive/{self._me}", "")
                    answered = number
            except RuntimeError:  # the store has gone
                return


def round_store(store: Store, number: int) -> PrefixStore:
    """Return the part of the agreement's store that belongs to round ``number``."""
    return PrefixStore(f"round/{number}", store)


def is_called(store: Store, number: int) -> bool:
    """Return whether a rank has called the others to round ``number``."""
    return bool(round_store(store, number).check(["called"]))
