"""Journal of a server: checkpoints, and everything that has happened since the last one, before it is acknowledged.

A server that was killed begins again with its last checkpoint and applies the rest once more, in the same order and so
with the same bits. What was written survives the process, as the operating system has it; a machine that loses power
may lose the last seconds.

::

    checkpoint-7.pt   state of the server
    journal-7         how it followed from the journal before, and everything that has happened since
    checkpoint-8.pt
    journal-8

If the last checkpoint is damaged, the one before is taken: its journal leads to the same state, since the same events
in the same order do, and the next one goes on from there. So nothing is lost then either.
"""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from pycomm.asynchronous.core import Core, Wanted
from pycomm.asynchronous.wire import as_array, bytes_of
from pycomm.checkpoint.files import DamagedError
from pycomm.checkpoint.torch_files import load_values
from pycomm.untrusted import (
    COUNT,
    ListOf,
    Number,
    OneOf,
    create_file,
    one_line,
    parse,
    reading,
)

_HEAD = struct.Struct("<IIQ")  # bytes of the text, checksum of it and of the data, bytes of the data
_LONGEST_TEXT = 2 << 20  # bytes
_LONGEST_PACKED, _TIMES_SHARD = 1 << 16, 4
"""Bytes of the longest push that is packed: so many, and so many times those of the shard."""

BEGIN = "begin"
"""Event with which a journal begins: how its checkpoint follows from the journal before."""

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
        content: what happened.
        data: what a push has brought.
    """

    where: str
    end: int
    content: dict[str, Any]
    data: bytearray

    @property
    def is_begin(self) -> bool:
        """Whether it is what a journal begins with."""
        return bool(self.content["event"] == BEGIN)


def packed(event: dict[str, Any], data: memoryview) -> list[bytes | memoryview]:
    """Return ``event``, with what a push has brought, as it is written."""
    text = json.dumps(event).encode()
    return [_HEAD.pack(len(text), zlib.crc32(data, zlib.crc32(text)), len(data)), text, data]


def read_events(path: Path, wanted: Wanted) -> Iterator[Event]:
    """Yield the events in the journal at ``path``, up to where it was cut short.

    Raises:
        ValueError: an event is none, although its checksum is right; or the file is no regular one. It is named.
        OSError: it cannot be read.
    """
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


def _next(file: BinaryIO, left: int, wanted: Wanted) -> tuple[bytearray, bytearray] | None:
    """Return text and data of the next event; ``None`` where the file was cut short: what it claims is no event."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    num_text, checksum, num_data = _HEAD.unpack(head)
    most = wanted.push_bytes
    if most is None:
        most = _LONGEST_PACKED + _TIMES_SHARD * wanted.size * wanted.dtype.itemsize
    if not 0 < num_text <= _LONGEST_TEXT or num_data > most or num_text + num_data > left - _HEAD.size:
        return None  # after a power cut, zeros may be left where it ends
    text, data = bytearray(num_text), bytearray(num_data)
    for part in (text, data):
        if file.readinto(part) != len(part):  # type: ignore[attr-defined]
            return None
    return (text, data) if zlib.crc32(data, zlib.crc32(text)) == checksum else None


def _check(content: dict[str, Any], data: bytearray, begin: int, wanted: Wanted, where: str) -> None:
    kind = content["event"]
    if kind == BEGIN and begin > 0:
        raise ValueError(f"{where} is malformed: a journal begins there")
    num_wanted = 0 if kind != "push" else wanted.push_bytes
    if num_wanted is not None and len(data) != num_wanted:
        raise ValueError(f"{where} is malformed: {kind!r} with {len(data)} bytes, wanted {num_wanted}")


def apply(core: Core, event: dict[str, Any], sent: torch.Tensor) -> None:
    """Apply ``event`` to ``core``; ``sent`` is what a push has brought."""
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


@contextmanager
def at(where: str) -> Iterator[None]:
    """Name the place of an event that cannot be applied, whatever a core or an optimizer raises."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{where}: this cannot have happened: {type(error).__name__}: {error}") from error


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
        last: number of the last valid journal.
        end: number of its valid bytes.

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
        """Return the numbers of the journals that follow each other, the first on top of the checkpoint.

        Later ones belong to checkpoints that are damaged or gone. An empty one without a checkpoint belongs to a server
        that died before it had written the checkpoint.
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
        """Check all events that are to be applied; return how many bytes of the last journal count."""
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
        """Raise ValueError unless the journal of ``event`` continues where journal ``number`` ends."""
        content = event.content
        if not event.is_begin or (content["journal"], content["bytes"]) != (number, end):
            path, why = journal_of(self._folder, number), "; ".join(self._damages.values()) or "a checkpoint is missing"
            raise ValueError(f"{event.where} does not go on where {path} ends, at byte {end}; {why}")

    def apply_to(self, core: Core) -> None:
        """Apply all of it to ``core``, and forget it."""
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
                        apply(core, event.content, as_array(event.data))


def _require_known(event: Event, known: set[int]) -> None:
    """Raise ValueError if ``event`` is of an unknown worker: only those that have joined pull and push."""
    kind = event.content["event"]
    if kind == "join":
        known.add(event.content["worker"])
    elif kind in ("pull", "push") and event.content["worker"] not in known:
        raise ValueError(f"{event.where} is malformed: worker {event.content['worker']} has not joined")


def _require_writable(folder: Path) -> None:
    probe = folder / "unfinished"
    create_file(probe).close()
    probe.unlink()


_LOG = logging.getLogger("pycomm")
_LEAST_BYTES = 64 << 20
_TIMES_SHARD = 8
"""A checkpoint is due when the journal is that many times as large as the shard, and so large at least."""


class Journal:
    """Journal of one server in ``folder``, which is made. Nothing can be written before the first checkpoint.

    Args:
        folder: of this server alone.
        core: what happens to; everything that the folder tells happens to it first.
        recovery: what the folder tells, if that is known.

    Raises:
        ValueError, OSError: as from :class:`Recovery`; or the optimizer does not take what was saved of it.
    """

    def __init__(self, folder: Path, core: Core, recovery: Recovery | None = None) -> None:
        recovery = recovery or Recovery(folder, core.wanted())
        recovery.apply_to(core)
        self._folder, self._core = folder, core
        self._file: BinaryIO | None = None
        self._base, self._number, self._end = recovery.base, recovery.last, recovery.end
        self._workers = set(core.mode.workers)

    def write(self, event: dict[str, Any], sent: torch.Tensor | None = None) -> None:
        """Write an event before it is applied, with what a push has brought."""
        assert self._file is not None
        for part in packed(event, memoryview(b"") if sent is None else bytes_of(sent)):
            self._file.write(part)
        self._file.flush()

    def is_long(self) -> bool:
        """Return whether it is time for a checkpoint."""
        assert self._file is not None
        return self._file.tell() > max(_LEAST_BYTES, _TIMES_SHARD * self._core.shard.memory.nbytes)

    def checkpoint(self) -> None:
        """Write a checkpoint, and begin the journal anew. The checkpoint before stays, in case this one is damaged."""
        begin = self._beginning()
        self.close()
        number, unfinished = self._number + 1, self._folder / "unfinished"
        with create_file(unfinished) as file:
            torch.save(self._core.state(), file)
            file.flush()
            os.fsync(file.fileno())
        self._file = create_file(journal_of(self._folder, number))  # before the checkpoint that it belongs to
        self.write(begin)
        unfinished.replace(checkpoint_of(self._folder, number))
        for path in earlier(self._folder, self._base):
            try:
                path.unlink()
            except OSError as error:
                _LOG.warning("an old file could not be removed: %s", error)
        self._base = self._number = number

    def _beginning(self) -> dict[str, Any]:
        """Return how the next checkpoint follows from the journal so far.

        Workers leave and join without an event where a server begins again.
        """
        end, before, now = self._end, self._workers, self._core.mode.workers
        if self._file is not None:
            end, before = self._file.tell(), now
        changes = {"left": sorted(before - now), "joined": sorted(now - before)}
        return {"event": BEGIN, "journal": self._number, "bytes": end, **changes}

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
