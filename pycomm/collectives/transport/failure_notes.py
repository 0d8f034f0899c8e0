"""Search for the rank that caused a failure, if the transport only reports that something failed.

A rank often sees a failure as a broken connection to another rank that gave up for the same reason. So each rank that
gives up writes a note to the process group's store that names the rank it blames. On its own host a rank also checks
whether the other ranks' processes are alive.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from pycomm import threads
from pycomm.collectives.transport.board import Board
from pycomm.collectives.transport.processes import fate_of
from pycomm.torch_internals import PrefixStore, Store
from pycomm.untrusted import INTEGER, OneOf, PairOf, escaped, parse

_GRACE = 2.0  # seconds for the other ranks to report that they are alive
_ANSWER = 1.0  # seconds for the store to answer
_LONGEST_REASON = 500  # characters
_REFUSAL = PairOf(INTEGER, str)
_NOTE = {"blamed?": OneOf(None, INTEGER), "reason?": str, "finished?": INTEGER}


class FailureNotes:
    """Notes in the store about failures of the ranks that met as ``name``: who is alive, and who caused a failure.

    Args:
        store: the process group's store.
        name: name of the meeting.
        rank: this rank.
        greetings: greetings of all ranks, with "host" and "pid".
    """

    def __init__(self, store: Store, name: str, rank: int, greetings: Sequence[Mapping[str, Any]]) -> None:
        self._rank = rank
        self._store = PrefixStore(f"pycomm/gave_up/{name}", store)
        here = greetings[rank]["host"]
        self._pids = [int(other["pid"]) if other["host"] == here else 0 for other in greetings]
        self._left = False

    def leave(self, blamed: int | None, reason: str, finished: int) -> None:
        """Note that this rank has stopped taking part. Only the first call counts.

        Args:
            blamed: the rank that caused it, perhaps this one; ``None`` if unknown.
            reason: explanation, for the other ranks' errors.
            finished: number of operations that this rank has completed.
        """
        if not self._left:
            self._left = True
            self._write_note({"blamed": blamed, "reason": reason[:_LONGEST_REASON], "finished": finished})

    def refuse(self, reason: str, operation: int) -> None:
        """Note why this rank cannot take part in an operation. Announcements carry the fact itself."""
        note = json.dumps([operation, reason[:_LONGEST_REASON]])
        self._ask(lambda: self._store.set(f"refused/{self._rank}", note))

    def refusal_of(self, rank: int, operation: int) -> str:
        """Return why ``rank`` could not take part in that operation; "" without a note."""
        found: list[str] = []

        def read() -> None:
            if self._store.check([f"refused/{rank}"]):
                with contextlib.suppress(ValueError):  # it is not a note
                    number, reason = parse(self._store.get(f"refused/{rank}"), _REFUSAL, "a note")
                    if number == operation:
                        found.append(escaped(reason))

        self._ask(read)
        return found[0] if found else ""

    def culprit(self, suspect: int | None, operation: int) -> tuple[int | None, str]:
        """Return the rank that caused the failure of an operation, and an explanation. Takes a moment.

        Args:
            suspect: the rank that was waited for, if known; the default result.
            operation: number of the operation. Ranks that have completed it are not involved.
        """

        def look(notes: Mapping[int, dict[str, Any]]) -> tuple[int, str] | None:
            done = {p for p, note in notes.items() if note.get("finished", -1) >= operation}
            return self._dead(done, notes) or self._blamed({p: note for p, note in notes.items() if p not in done})

        return self._search(suspect, look)

    def culprit_of_message(self, suspect: int | None, _: int) -> tuple[int | None, str]:
        """Return the rank that caused the failure of a message, and an explanation.

        It is a rank that has died; otherwise ``suspect``, or the rank that ``suspect``'s note blames, and so on.
        """

        def look(notes: Mapping[int, dict[str, Any]]) -> tuple[int, str] | None:
            return self._dead(frozenset(), notes) or self._cause_of(suspect, notes)

        return self._search(suspect, look)

    def _search(
        self, suspect: int | None, look: Callable[[Mapping[int, dict[str, Any]]], tuple[int, str] | None]
    ) -> tuple[int | None, str]:
        """Return what ``look`` finds in the notes within a moment; else ``suspect`` or another rank without a note."""
        self._write_note({})  # this rank is alive
        give_up = time.monotonic() + _GRACE
        notes: dict[int, dict[str, Any]] = {}
        while time.monotonic() < give_up and not threads.is_exiting():
            notes = self._notes()
            found = look(notes)
            if found is not None:
                return found
            time.sleep(0.02)
        silent = [p for p in range(len(self._pids)) if p not in notes and p != self._rank]
        if suspect not in silent and silent:
            suspect = silent[0]
        return suspect, "" if suspect is None else f"rank {suspect} was waited for"

    def _dead(self, done: Set[int], notes: Mapping[int, dict[str, Any]]) -> tuple[int, str] | None:
        """Return the first rank whose process is dead or stopped, unless it had left before, with a reason."""
        for p, pid in enumerate(self._pids):
            has_left = "reason" in notes.get(p, {})
            fate = "" if p in done or pid == 0 or has_left else fate_of(pid)
            if fate:
                return p, f"rank {p} {fate}"
        return None

    def _blamed(self, notes: Mapping[int, dict[str, Any]]) -> tuple[int, str] | None:
        """Return a rank that blames itself, else one that another rank blames, with the reason."""
        for p, note in notes.items():
            if note.get("blamed") == p:
                return p, f"rank {p} gave up ({note.get('reason')})"
        for p, note in notes.items():
            blamed = note.get("blamed")
            if blamed is not None and blamed in range(len(self._pids)) and blamed != self._rank:
                return blamed, f"rank {p} gave up ({note.get('reason')})"
        return None

    def _cause_of(self, suspect: int | None, notes: Mapping[int, dict[str, Any]]) -> tuple[int, str] | None:
        """Follow the blame from ``suspect`` on; return the last rank and reason, ``None`` if ``suspect`` has not left.

        Without a ``suspect``, return the result of :meth:`_blamed`.
        """
        if suspect is None:
            return self._blamed(notes)
        at, reason, seen = suspect, "", {self._rank}
        while "reason" in notes.get(at, {}) and at not in seen:
            seen.add(at)
            reason = f"rank {at} gave up ({notes[at]['reason']})"
            blamed = notes[at].get("blamed")
            at = blamed if blamed is not None and blamed in range(len(self._pids)) and blamed not in seen else at
        return (at, reason) if reason else None

    def _write_note(self, note: dict[str, Any]) -> None:
        self._ask(lambda: self._store.set(str(self._rank), json.dumps(note)))

    def _notes(self) -> dict[int, dict[str, Any]]:
        notes: dict[int, dict[str, Any]] = {}

        def read() -> None:
            for p in range(len(self._pids)):
                if p != self._rank and self._store.check([str(p)]):
                    with contextlib.suppress(ValueError):  # it is not a note
                        note = parse(self._store.get(str(p)), _NOTE, "a note")
                        notes[p] = note | {"reason": escaped(note["reason"])} if "reason" in note else note

        self._ask(read)
        return dict(notes)

    def _ask(self, question: Callable[[], object]) -> None:
        """Ask the store; give up silently if it fails or hangs. The thread ends with the answer."""
        with Board(f"pycomm-failure-notes-{self._rank}") as board, contextlib.suppress(RuntimeError):
            board.ask(question, _ANSWER)
