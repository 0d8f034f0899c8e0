"""Journal of a server: checkpoints, and every event since the last one, written before it is acknowledged.

A restarted server loads its last checkpoint and applies the later events again, in the same order, so its state has the
same bits. The operating system keeps what was written after the process was killed; the last seconds may be lost if the
machine loses power.

::

    checkpoint-7.pt   state of the server
    journal-7         how the checkpoint follows from the journal before, and all events since
    checkpoint-8.pt
    journal-8

If the last checkpoint is damaged, the one before is loaded: the events of its journal lead to the same state, and the
next journal continues from there. So nothing is lost.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from pycomm.training.asynchronous.core import Core, StateSpec, explained, packed_limit
from pycomm.training.asynchronous.wire import as_array, bytes_of
from pycomm.training.checkpoint.files import DamagedError, save_values
from pycomm.training.checkpoint.torch_files import load_values
from pycomm.untrusted import COUNT, ListOf, Number, OneOf, create_file, naming, one_line, parse, reading

_LOG = logging.getLogger("pycomm")
_HEAD = struct.Struct("<IIQ")  # bytes of the text, checksum of it and of the data, bytes of the data
_LONGEST_TEXT = 2 << 20  # bytes

BEGIN = "begin"
"""First event of a journal: how its checkpoint follows from the journal before."""

_SHAPES: dict[str, dict[str, Any]] = {
    BEGIN: {"journal": COUNT, "bytes": COUNT, "left": ListOf(COUNT), "joined": ListOf(COUNT)},
    "join": {"worker": COUNT, "life": str},
    "leave": {"worker": COUNT},
    "pull": {"worker": COUNT},
    "push": {"worker": COUNT, "number": COUNT, "samples": Number(0)},
}
_EVENT = {"event": OneOf(*_SHAPES)}


class Event(NamedTuple):
    """Event in a journal.

    Attributes:
        where: file and position, for errors.
        end: position after it.
        content: the event itself.
        data: data of a push.
    """

    where: str
    end: int
    content: dict[str, Any]
    data: bytearray

    @property
    def is_begin(self) -> bool:
        return bool(self.content["event"] == BEGIN)


def packed(event: dict[str, Any], data: memoryview) -> list[bytes | memoryview]:
    """Return the bytes of ``event`` in the file, with the data of a push."""
    text = json.dumps(event).encode()
    return [_HEAD.pack(len(text), zlib.crc32(data, zlib.crc32(text)), len(data)), text, data]


def read_events(path: Path, wanted: StateSpec) -> Iterator[Event]:
    """Yield the events in the journal at ``path``, up to an incomplete or damaged one."""
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = 0
        while (found := _next(file, size - begin, wanted)) is not None:
            text, data = found
            where = f"{path} at byte {begin}"
            content = parse(bytes(text), _EVENT, where)
            content = parse(bytes(text), {**_EVENT, **_SHAPES[content["event"]]}, where)
            _check(content, data, begin, wanted, where)
            begin += _HEAD.size + len(text) + len(data)
            yield Event(where, begin, content, data)


def _next(file: BinaryIO, left: int, wanted: StateSpec) -> tuple[bytearray, bytearray] | None:
    """Return text and data of the next event; ``None`` if it is incomplete or damaged."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    num_text, checksum, num_data = _HEAD.unpack(head)
    most = wanted.push_bytes
    if most is None:
        most = packed_limit(wanted.size * wanted.dtype.itemsize)
    if not 0 < num_text <= _LONGEST_TEXT or num_data > most or num_text + num_data > left - _HEAD.size:
        return None  # after a power cut, the file may end with zeros
    text, data = bytearray(num_text), bytearray(num_data)
    for part in (text, data):
        if file.readinto(part) != len(part):  # type: ignore[attr-defined]
            return None
    return (text, data) if zlib.crc32(data, zlib.crc32(text)) == checksum else None


def _check(content: dict[str, Any], data: bytearray, begin: int, wanted: StateSpec, where: str) -> None:
    kind = content["event"]
    if kind == BEGIN and begin > 0:
        raise ValueError(f"{where} is malformed: a journal begins there")
    num_wanted = 0 if kind != "push" else wanted.push_bytes
    if num_wanted is not None and len(data) != num_wanted:
        raise ValueError(f"{where} is malformed: {kind!r} with {len(data)} bytes, wanted {num_wanted}")


def apply(core: Core, event: dict[str, Any], sent: torch.Tensor) -> None:
    """Apply ``event`` to ``core``, with the data ``sent`` by a push."""
    if event["event"] == BEGIN:
        for number in event["left"]:
            core.leave(number)
        for number in event["joined"]:
            core.mode.join(number)
        return
    worker = event["worker"]
    match event["event"]:
        case "join":
            core.join(worker, event["life"])
        case "leave":
            core.leave(worker)
        case "pull":
            core.pull(worker)
        case "push":
            gradient = core.gradient_of(worker, event["number"], sent)
            core.push(worker, event["number"], event["samples"], gradient)


_CHECKPOINT = re.compile(r"checkpoint-([1-9][0-9]{0,17})\.pt")
_JOURNAL = re.compile(r"journal-([1-9][0-9]{0,17})")


def _checkpoint_path(folder: Path, number: int) -> Path:
    return folder / f"checkpoint-{number}.pt"


def _journal_path(folder: Path, number: int) -> Path:
    return folder / f"journal-{number}"


def _files_before(folder: Path, number: int) -> list[Path]:
    """Return the checkpoints and journals before ``number``."""
    found = [(path, _CHECKPOINT.fullmatch(path.name) or _JOURNAL.fullmatch(path.name)) for path in folder.iterdir()]
    return [path for path, name in found if name is not None and int(name[1]) < number]


class Recovery:
    """Checkpoint and journals in ``folder``, checked, from which a server restarts.

    Args:
        folder: folder of this server alone; made if it does not exist.
        wanted: form of state that the server accepts.

    Attributes:
        base: number of the checkpoint to load; 0 if there is none yet.
        last: number of the last valid journal.
        end: number of its valid bytes.
    """

    def __init__(self, folder: Path, wanted: StateSpec) -> None:
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
        """Load the last usable checkpoint, and return its number; 0 if there are no checkpoints."""
        for number in sorted(checkpoints, reverse=True):
            path = _checkpoint_path(self._folder, number)
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
        """Return the numbers of the journals to apply to the checkpoint, in order.

        Those after the first belong to checkpoints that are damaged or missing. An empty journal without a checkpoint
        belongs to a server that died before it had written the checkpoint.
        """
        later = [
            number
            for number in sorted(self._journals)
            if number > self.base
            and (number in checkpoints or any(not event.is_begin for event in self._events(number)))
        ]
        chain = [self.base] if self.base in self._journals else []
        if self.base and not chain:
            _LOG.warning("%s is not there", _journal_path(self._folder, self.base))
        for number in later:
            path, before = _journal_path(self._folder, number), chain[-1] if chain else 0
            if number != before + 1 or not before:
                missing = f"{_checkpoint_path(self._folder, number)} is missing"
                why = self._damages.get(number, missing)
                raise ValueError(f"{path} goes on from a checkpoint that cannot be used: {why}")
            chain.append(number)
        return chain

    def _events(self, number: int) -> Iterator[Event]:
        return read_events(_journal_path(self._folder, number), self._wanted)

    def _checked(self) -> int:
        """Check all events to apply; return the number of valid bytes in the last journal."""
        end = 0
        known = set() if self._state is None else set(self._state["last"])
        for place, number in enumerate(self._chain):
            path, before, end = _journal_path(self._folder, number), end, 0
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
        """Raise ValueError unless the journal of ``event`` continues where journal ``number`` ends."""
        content = event.content
        if not event.is_begin or (content["journal"], content["bytes"]) != (number, end):
            path = _journal_path(self._folder, number)
            why = "; ".join(self._damages.values()) or "a checkpoint is missing"
            raise ValueError(f"{event.where} does not go on where {path} ends, at byte {end}; {why}")

    def apply_to(self, core: Core) -> None:
        """Load the checkpoint into ``core``, apply the events, and release the state."""
        if self._state is None:
            return
        state, self._state = self._state, None
        try:
            core.load_state(state)
        except ValueError as error:
            raise ValueError(f"{_checkpoint_path(self._folder, self.base)}: {error}") from error
        for place, number in enumerate(self._chain):
            for event in self._events(number):
                if place > 0 or not event.is_begin:  # the checkpoint includes its own journal's first event
                    with explained(f"{event.where}: this cannot have happened"):
                        apply(core, event.content, as_array(event.data))


def _require_known(event: Event, known: set[int]) -> None:
    """Raise ValueError if the worker of a pull or push has not joined; add one that joins to ``known``."""
    kind = event.content["event"]
    if kind == "join":
        known.add(event.content["worker"])
    elif kind in ("pull", "push") and event.content["worker"] not in known:
        raise ValueError(f"{event.where} is malformed: worker {event.content['worker']} has not joined")


def _require_writable(folder: Path) -> None:
    probe = folder / "unfinished"
    create_file(probe).close()
    probe.unlink()


_LEAST_BYTES, _TIMES_SHARD = 64 << 20, 8
"""A checkpoint is due when the journal has this many bytes, and this many times the bytes of the shard."""


class Journal:
    """Journal of one server in ``folder``. The first call must be :meth:`checkpoint`.

    Args:
        folder: folder of this server alone.
        core: the server's core, to which the saved state and events are applied.
        recovery: the checked content of the folder, if it was read before.
    """

    def __init__(self, folder: Path, core: Core, recovery: Recovery | None = None) -> None:
        recovery = recovery or Recovery(folder, core.state_spec())
        recovery.apply_to(core)
        self._folder, self._core, self._path = folder, core, folder
        self._file: BinaryIO | None = None
        self._base, self._number, self._end = recovery.base, recovery.last, recovery.end
        self._workers = set(core.mode.workers)

    def write(self, event: dict[str, Any], sent: torch.Tensor | None = None) -> None:
        """Write an event before it is applied, with the data of a push."""
        assert self._file is not None
        with naming(self._path):
            for part in packed(event, memoryview(b"") if sent is None else bytes_of(sent)):
                self._file.write(part)
            self._file.flush()

    def is_long(self) -> bool:
        """Return whether a checkpoint is due."""
        assert self._file is not None
        return self._file.tell() > max(_LEAST_BYTES, _TIMES_SHARD * self._core.shard.memory.nbytes)

    def checkpoint(self) -> None:
        """Write a checkpoint, and begin a new journal. The previous checkpoint stays, in case this one is damaged."""
        begin = self._beginning()
        self.close()
        number, unfinished = self._number + 1, self._folder / "unfinished"
        save_values(unfinished, self._core.state())
        self._path = _journal_path(self._folder, number)
        self._file = create_file(self._path)  # before its checkpoint
        self.write(begin)
        unfinished.replace(_checkpoint_path(self._folder, number))
        for path in _files_before(self._folder, self._base):
            try:
                path.unlink()
            except OSError as error:
                _LOG.warning("an old file could not be removed: %s", error)
        self._base = self._number = number

    def _beginning(self) -> dict[str, Any]:
        """Return the next journal's first event. When a server restarts, workers leave and join without an event."""
        end, before, now = self._end, self._workers, self._core.mode.workers
        if self._file is not None:
            end, before = self._file.tell(), now
        changes = {"left": sorted(before - now), "joined": sorted(now - before)}
        return {"event": BEGIN, "journal": self._number, "bytes": end, **changes}

    def close(self) -> None:
        if self._file is not None:
            with naming(self._path):
                self._file.close()
