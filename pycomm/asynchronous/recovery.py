"""Recovery of a server: what its folder tells, found and checked before anything of it happens.

::

    checkpoint-7.pt   state of the server
    journal-7         how it followed from the journal before, and everything that has happened since
    checkpoint-8.pt
    journal-8

The last checkpoint is taken, and what its journal tells happens once more. If that checkpoint is damaged, the one
before is taken: its journal leads to the same state, since the same events in the same order do, and the next one goes
on from there. So nothing is lost then either.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pycomm.asynchronous.core import Core
from pycomm.asynchronous.events import Event, at, happen, read_events
from pycomm.asynchronous.states import Wanted
from pycomm.asynchronous.wire import as_array
from pycomm.checkpoint.files import DamagedError
from pycomm.checkpoint.torch_files import load_values
from pycomm.untrusted import create_file, one_line

_LOG = logging.getLogger("pycomm")
_CHECKPOINT = re.compile(r"checkpoint-([1-9][0-9]{0,17})\.pt")
_JOURNAL = re.compile(r"journal-([1-9][0-9]{0,17})")


def checkpoint_of(folder: Path, number: int) -> Path:
    """Return the path of a checkpoint."""
    return folder / f"checkpoint-{number}.pt"


def journal_of(folder: Path, number: int) -> Path:
    """Return the path of a journal."""
    return folder / f"journal-{number}"


def earlier(folder: Path, number: int) -> list[Path]:
    """Return the checkpoints and journals before ``number``."""
    found = [(path, _CHECKPOINT.fullmatch(path.name) or _JOURNAL.fullmatch(path.name)) for path in folder.iterdir()]
    return [path for path, name in found if name is not None and int(name[1]) < number]


class Recovery:
    """What ``folder`` tells of a server, which is made if it is not there.

    Args:
        folder: of this server alone.
        wanted: what the server can take.

    Attributes:
        base: number of the checkpoint that is taken; 0 if there is none yet.
        last: number of the last journal that counts.
        end: bytes of that journal that count.

    Raises:
        ValueError: it is of another model or optimizer, or of other settings; no checkpoint can be used, or what a
            journal tells cannot have happened. The file is named.
        OSError: it cannot be read or written.
    """

    def __init__(self, folder: Path, wanted: Wanted) -> None:
        self._folder, self._wanted = folder, wanted
        folder.mkdir(parents=True, exist_ok=True)
        _require_writable(folder)
        names = sorted(os.listdir(folder))
        self._journals = {int(found[1]) for name in names if (found := _JOURNAL.fullmatch(name))}
        checkpoints = [int(found[1]) for name in names if (found := _CHECKPOINT.fullmatch(name))]
        self._damages: dict[int, str] = {}
        self._state: dict[str, Any] | None = None
        self.base = self._find(checkpoints)
        self._chain = self._follow(set(checkpoints))
        self.last = self._chain[-1] if self._chain else self.base
        self.end = self._checked()

    def _find(self, checkpoints: list[int]) -> int:
        """Return the number of the last checkpoint that can be used, whose state is kept; 0 if there is none at all."""
        for number in sorted(checkpoints, reverse=True):
            path = checkpoint_of(self._folder, number)
            try:
                state = load_values(path)
                self._wanted.check(state, str(path))
            except (OSError, DamagedError) as error:
                self._damages[number] = str(error)
                _LOG.warning("%s cannot be used: %s", path, one_line(str(error)))
                continue
            self._state = state
            return number
        if self._damages:
            raise ValueError(f"no checkpoint in {self._folder} can be used: {'; '.join(self._damages.values())}")
        return 0

    def _follow(self, checkpoints: set[int]) -> list[int]:
        """Return the numbers of the journals that happen one after the other, the first on top of the checkpoint.

        Later ones are those of checkpoints that are damaged or gone. One that nothing was written to, and that has no
        checkpoint, belongs to a server that died before it had made that.
        """
        later = [
            number
            for number in sorted(self._journals)
            if number > self.base and (number in checkpoints or self._tells(number))
        ]
        chain = [self.base] if self.base in self._journals else []
        if self.base and not chain:
            _LOG.warning("%s is not there", journal_of(self._folder, self.base))
        for number in later:
            path, before = journal_of(self._folder, number), chain[-1] if chain else 0
            if number != before + 1 or not before:
                missing = f"{checkpoint_of(self._folder, number)} is missing"
                why = self._damages.get(number, missing)
                raise ValueError(f"{path} goes on from a checkpoint that cannot be used: {why}")
            chain.append(number)
        return chain

    def _tells(self, number: int) -> bool:
        """Return whether a journal tells of anything but its beginning."""
        return any(not event.is_begin for event in self._events(number))

    def _events(self, number: int) -> Iterator[Event]:
        return read_events(journal_of(self._folder, number), self._wanted)

    def _checked(self) -> int:
        """Compare all that is to happen with what can; return how many bytes of the last journal count."""
        end = 0
        known = set() if self._state is None else set(self._state["last"])
        for place, number in enumerate(self._chain):
            path, before, end = journal_of(self._folder, number), end, 0
            for event in self._events(number):
                if place > 0 and end == 0:
                    self._require_next(event, self._chain[place - 1], before)
                _require_known(event, known)
                end = event.end
            if place > 0 and end == 0:
                raise ValueError(f"{path} is damaged where it begins, and {self._damages.get(number, 'no checkpoint')}")
            size = path.stat().st_size
            if end < size:
                _LOG.warning("%s ends at byte %d of %d: what was written after that is damaged", path, end, size)
        return end

    def _require_next(self, event: Event, number: int, end: int) -> None:
        """Raise ValueError unless ``event`` says that its journal goes on where that of ``number`` ends."""
        told = event.content
        if not event.is_begin or (told["journal"], told["bytes"]) != (number, end):
            path, why = journal_of(self._folder, number), "; ".join(self._damages.values()) or "a checkpoint is missing"
            raise ValueError(f"{event.where} does not go on where {path} ends, at byte {end}; {why}")

    def happen_to(self, core: Core) -> None:
        """Let all of it happen to ``core``, and forget it."""
        if self._state is None:
            return
        state, self._state = self._state, None
        try:
            core.load_state(state)
        except ValueError as error:
            raise ValueError(f"{checkpoint_of(self._folder, self.base)}: {error}") from error
        for place, number in enumerate(self._chain):
            for event in self._events(number):
                if place > 0 or not event.is_begin:  # its checkpoint has that
                    with at(event.where):
                        happen(core, event.content, as_array(event.data))


def _require_known(event: Event, known: set[int]) -> None:
    """Raise ValueError if ``event`` is of a worker that is not known, as only one that has joined pulls and pushes."""
    kind = event.content["event"]
    if kind == "join":
        known.add(event.content["worker"])
    elif kind in ("pull", "push") and event.content["worker"] not in known:
        raise ValueError(f"{event.where} is malformed: worker {event.content['worker']} has not joined")


def _require_writable(folder: Path) -> None:
    probe = folder / "unfinished"
    create_file(probe).close()
    probe.unlink()
