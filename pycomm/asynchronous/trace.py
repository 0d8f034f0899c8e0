"""Traces: the order of what has happened to a server, by which it can happen again to the bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pycomm.untrusted import COUNT, OneOf, open_output, parse, reading

KEYS = ("event", "worker", "number")
"""What tells an event from the others of its worker."""

_EVENT = {"event": OneOf("pull", "push", "leave"), "worker": COUNT, "number?": COUNT}
_LARGEST = 512 << 20  # bytes: ten million events


class Trace:
    """Trace that is written to ``path``, an event a line. What was in that file stays until :meth:`begin`.

    Raises:
        ValueError: it is no regular file.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_output(path)

    def begin(self) -> None:
        """Begin the trace, in an empty file."""
        self._file.truncate(0)

    def write(self, event: dict[str, Any]) -> None:
        """Write what is about to happen."""
        self._file.write(json.dumps({key: event[key] for key in KEYS if key in event}).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Replay:
    """Order that was traced at ``path``, in which events shall happen again.

    Raises:
        ValueError: the file is no trace.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with reading(path) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST:
                raise ValueError(f"replay={str(path)!r} has more than {_LARGEST} bytes")
            try:
                self._events = [_order(parse(line, _EVENT, f"line {n}")) for n, line in enumerate(file, 1)]
            except ValueError as error:
                raise ValueError(f"replay={str(path)!r} is no trace: {error}") from error
        self._next = 0

    def is_next(self, event: dict[str, Any]) -> bool:
        """Return whether ``event`` is the one to happen now. After the last one, any is."""
        return self._next >= len(self._events) or _order(event) == self._events[self._next]

    def advance(self) -> None:
        """Note that the next event has happened."""
        self._next += 1


def _order(event: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells ``event`` from the others."""
    return tuple(event.get(key) for key in KEYS)
