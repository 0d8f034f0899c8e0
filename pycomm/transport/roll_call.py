"""Finding out whose fault it was, where the transport only says that something failed.

A broken connection shows up wherever a rank happens to wait, often for another one that has given up
for the same reason. So each rank that gives up says so in the process group's store, and whom it blames;
on its own host a rank also looks at the others' processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import pycomm._native as _native
from pycomm.torch_internals import PrefixStore, Store
from pycomm.transport.rendezvous import host_identity
from pycomm.worker import Worker

_GRACE = 2.0  # seconds for the others to say that they live
_ANSWER = 1.0  # seconds for the store to answer
_LONGEST_REASON = 500  # characters

_FATES = {"dead": "died", "stopped": "is stopped", "dumping core": "is dumping core"}


def _int(value: object) -> int:
    """``value`` of a note, which may hold anything; -1 where it is no number."""
    return value if isinstance(value, int) else -1


class RollCall:
    """Who is still there, of the ranks that met as ``name``.

    Args:
        greetings: everybody's, with "host" and "pid".
    """

    def __init__(self, store: Store, name: str, rank: int, greetings: Sequence[Mapping[str, Any]]) -> None:
        self._rank = rank
        self._store = PrefixStore(f"pycomm/gave_up/{name}", store)
        here = host_identity()
        self._pids = [int(other["pid"]) if other["host"] == here else 0 for other in greetings]
        self._left = False

    def leave(self, blamed: int | None, reason: str, finished: int) -> None:
        """Say that this rank takes part no more. Only the first time counts.

        Args:
            blamed: whose fault that is: this rank's, another's, or ``None``, which nobody knows.
            finished: how many operations it has ended well.
        """
        if not self._left:
            self._left = True
            self._say({"blamed": blamed, "reason": reason[:_LONGEST_REASON], "finished": finished})

    def culprit(self, suspect: int | None, operation: int) -> tuple[int | None, str]:
        """Who is to blame for an operation that failed, and what is known of it; takes a moment.

        Args:
            suspect: who was waited for, if that is known; blamed if nothing better comes up.
            operation: its number. Who has finished so many has nothing to do with it.
        """
        self._say({})  # that this rank lives
        give_up = time.monotonic() + _GRACE
        notes: dict[int, dict[str, Any]] = {}
        done: set[int] = set()
        while time.monotonic() < give_up:
            notes = self._notes()
            done = {p for p, note in notes.items() if _int(note.get("finished")) >= operation}
            found = self._dead(done) or self._accused({p: note for p, note in notes.items() if p not in done})
            if found is not None:
                return found
            time.sleep(0.02)
        silent = [p for p in range(len(self._pids)) if p not in notes and p != self._rank]
        if suspect not in silent and silent:
            suspect = silent[0]
        return suspect, "" if suspect is None else f"rank {suspect} was waited for"

    def _dead(self, done: Set[int]) -> tuple[int, str] | None:
        for p, pid in enumerate(self._pids):
            fate = "" if p in done else self._fate(pid)
            if fate:
                return p, f"rank {p} {fate}"
        return None

    def _fate(self, pid: int) -> str:
        return "" if pid in (0, os.getpid()) else _FATES.get(_native.process_state(pid), "")

    def _accused(self, notes: Mapping[int, dict[str, Any]]) -> tuple[int, str] | None:
        """Who has left by its own fault; else whom another one blames."""
        for p, note in notes.items():
            if note.get("blamed") == p:
                return p, f"rank {p} gave up ({note.get('reason')})"
        for p, note in notes.items():
            blamed = _int(note.get("blamed"))
            if blamed in range(len(self._pids)) and blamed != self._rank:
                return blamed, f"rank {p} gave up ({note.get('reason')})"
        return None

    def _say(self, note: dict[str, Any]) -> None:
        self._ask(lambda: self._store.set(str(self._rank), json.dumps(note)))

    def _notes(self) -> dict[int, dict[str, Any]]:
        notes: dict[int, dict[str, Any]] = {}

        def read() -> None:
            for p in range(len(self._pids)):
                if p != self._rank and self._store.check([str(p)]):
                    with contextlib.suppress(ValueError, RecursionError):  # what is no note
                        note = json.loads(self._store.get(str(p)))
                        notes[p] = note if isinstance(note, dict) else {}

        self._ask(read)
        return dict(notes)

    def _ask(self, question: Callable[[], object]) -> None:
        """The store may be gone with its host, or hang: then nothing is said."""
        asker = Worker(f"pycomm-roll-call-{self._rank}")
        with contextlib.suppress(RuntimeError):
            asker.submit(question).ends_within(_ANSWER)
        asker.stop(patience=0.0)
