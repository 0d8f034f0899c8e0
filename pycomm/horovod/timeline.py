"""Timeline: what the operations of rank 0 spend their time on, as a file that chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any, TextIO


class Timeline:
    """Timeline, which writes while it is active.

    Attributes:
        active: whether notes are taken.
    """

    def __init__(self) -> None:
        self.active = False
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._marks_cycles = False
        self._rows: dict[str, int] = {}
        self._open: dict[str, list[str]] = {}

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a file at ``path``; one that is being written is finished first."""
        self.stop()
        with self._lock:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until stop()
            self._file.write("[\n")
            self._marks_cycles = mark_cycles
            self._rows, self._open = {}, {}
            epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._write({"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "pycomm.horovod"}}, first=True)
            self._write({"name": "start", "ph": "i", "pid": 0, "tid": 0, "ts": _now(), "s": "g", "args": epoch})
            self.active = True

    def stop(self) -> None:
        """Finish the file, if one is being written."""
        with self._lock:
            self.active = False
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def begin(self, name: str, what: str) -> None:
        """Note that ``what`` begins for the operation ``name``."""
        with self._lock:
            self._open.setdefault(name, []).append(what)
            self._event(name, {"name": what, "ph": "B"})

    def end(self, name: str) -> None:
        """Note that what began last for the operation ``name`` has ended."""
        with self._lock:
            if self._open.get(name):
                self._event(name, {"name": self._open[name].pop(), "ph": "E"})

    def mark(self, what: str) -> None:
        """Note that ``what`` happens now, if cycles are to be marked."""
        if self._marks_cycles:
            with self._lock:
                self._write({"name": what, "ph": "i", "pid": 0, "tid": 0, "ts": _now(), "s": "g"})

    def _event(self, name: str, event: dict[str, Any]) -> None:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            self._write({"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}})
        self._write({**event, "pid": 0, "tid": row, "ts": _now()})

    def _write(self, event: dict[str, Any], first: bool = False) -> None:
        if self._file is not None:
            self._file.write(("" if first else ",\n") + json.dumps(event))


def _now() -> float:
    return time.monotonic_ns() / 1000


def path_from_environment() -> str:
    """Return where ``HOROVOD_TIMELINE`` wants one from the beginning; empty if it does not."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    return "" if path.upper() == "DYNAMIC" else path
