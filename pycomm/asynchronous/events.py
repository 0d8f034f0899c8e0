"""Events of a server as its journal holds them, read back, and happening once more."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from pycomm.asynchronous.core import Core
from pycomm.asynchronous.states import Wanted
from pycomm.untrusted import COUNT, ListOf, Number, OneOf, parse, reading

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


def happen(core: Core, event: dict[str, Any], sent: torch.Tensor) -> None:
    """Let ``event`` happen to ``core``; ``sent`` is what a push has brought."""
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
    """Name the place of an event that cannot happen: whatever it is that a core, or an optimizer, raises then."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{where}: this cannot have happened: {type(error).__name__}: {error}") from error
