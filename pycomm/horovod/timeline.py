"""Timeline: what the operations of rank 0 spend their time on, as a file that chrome://tracing and Perfetto show."""

from __future__ import annotations

import os
import threading
import time
from typing import TextIO

from pycomm.collectives.recorder.traces import ChromeTrace


class Timeline:
    """Timeline, which writes while it is active.

    Attributes:
        active: whether notes are taken.
    """

    def __init__(self) -> None:
        self.active = False
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._trace: ChromeTrace | None = None
        self._marks_cycles = False
        self._rows: dict[str, int] = {}
        self._open: dict[str, list[str]] = {}

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a file at ``path``; one that is being written is finished first."""
        self.stop()
        with self._lock:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until stop()
            self._trace = ChromeTrace(self._file)
            self._marks_cycles = mark_cycles
            self._rows, self._open = {}, {}
            epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._trace.name_process(0, "pycomm.horovod")
            self._trace.add("start", "i", 0, tid=0, ts=_now(), s="g", args=epoch)
            self.active = True

    def stop(self) -> None:
        """Finish the file, if one is being written."""
        with self._lock:
            self.active = False
            if self._file is not None and self._trace is not None:
                self._trace.end()
                self._file.close()
            self._file = self._trace = None

    def begin(self, name: str, what: str) -> None:
        """Note that ``what`` begins for the operation ``name``."""
        with self._lock:
            self._open.setdefault(name, []).append(what)
            self._add(name, what, "B")

    def end(self, name: str) -> None:
        """Note that what began last for the operation ``name`` has ended."""
        with self._lock:
            if self._open.get(name):
                self._add(name, self._open[name].pop(), "E")

    def mark(self, what: str) -> None:
        """Note that ``what`` happens now, if cycles are to be marked."""
        with self._lock:
            if self._trace is not None and self._marks_cycles:
                self._trace.add(what, "i", 0, tid=0, ts=_now(), s="g")

    def _add(self, operation: str, what: str, phase: str) -> None:
        if self._trace is None:
            return
        if operation not in self._rows:
            self._rows[operation] = len(self._rows) + 1
            self._trace.name_row(0, self._rows[operation], operation)
        self._trace.add(what, phase, 0, tid=self._rows[operation], ts=_now())


def _now() -> float:
    return time.monotonic_ns() / 1000


def path_from_environment() -> str:
    """Return the file that ``HOROVOD_TIMELINE`` asks for from the beginning; empty if it asks for none."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    return "" if path.upper() == "DYNAMIC" else path
