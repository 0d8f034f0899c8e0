"""Traces: the order of what has happened to a server, by which it can happen again to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

KEYS = ("event", "worker", "number")
"""What tells an event from the others of its worker."""


class Trace:
    """Trace that is written to ``path``, an event a line."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w")

    def write(self, event: dict[str, Any]) -> None:
        """Write what is about to happen."""
        self._file.write(json.dumps({key: event[key] for key in KEYS if key in event}) + "\n")
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
        try:
            self._events = [json.loads(line) for line in path.read_text().splitlines()]
            if not all(isinstance(event, dict) and {"event", "worker"} <= event.keys() for event in self._events):
                raise ValueError("its lines are no events")
        except ValueError as error:
            raise ValueError(f"replay={str(path)!r} is no trace: {error}") from error
        self._next = 0

    def is_next(self, event: dict[str, Any]) -> bool:
        """Return whether ``event`` is the one to happen now. After the last one, any is."""
        if self._next >= len(self._events):
            return True
        return bool({key: event[key] for key in KEYS if key in event} == self._events[self._next])

    def advance(self) -> None:
        """Note that the next event has happened."""
        self._next += 1
