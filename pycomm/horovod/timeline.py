"""Timeline of the phases of rank 0's operations, as a file for chrome://tracing and Perfetto."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from pycomm.collectives.recorder.traces import ChromeTrace
from pycomm.untrusted import open_output

_LOG = logging.getLogger("pycomm")


class Timeline:
    """Timeline, which writes while it is ``active``."""

    def __init__(self) -> None:
        self.active = False
        self._lock = threading.Lock()
        self._path = ""
        self._file: TextIO | None = None
        self._trace: ChromeTrace | None = None
        self._marks_cycles = False
        self._rows: dict[str, int] = {}
        self._open: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock; an error of the file ends the timeline, and not training."""
        with self._lock:
            file = self._file
            try:
                yield
            except OSError as error:
                _LOG.warning("the timeline %s ends here: %s", self._path, error)
                self.active, self._file, self._trace = False, None, None
                with contextlib.suppress(OSError):
                    if file:
                        file.close()

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a file at ``path``, after an earlier one. Raises OSError or ValueError if it cannot be written."""
        self.stop()
        with self._lock:
            self._path, self._file = path, io.TextIOWrapper(open_output(path), encoding="utf-8")
            self._file.truncate(0)
            self._trace = ChromeTrace(self._file)
            self._marks_cycles = mark_cycles
            self._rows, self._open = {}, {}
            epoch = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
            self._trace.name_process(0, "pycomm.horovod")
            self._trace.add("start", "i", 0, tid=0, ts=_now(), s="g", args=epoch)
            self.active = True

    def stop(self) -> None:
        """Finish the file, if one is being written."""
        with self._writing():
            self.active = False
            if self._file is not None and self._trace is not None:
                self._trace.end()
                self._file.close()
            self._file = self._trace = None

    def begin(self, name: str, what: str) -> None:
        """Record that phase ``what`` of operation ``name`` begins."""
        with self._writing():
            self._open.setdefault(name, []).append(what)
            self._add(name, what, "B")

    def end(self, name: str) -> None:
        """Record that the latest phase of operation ``name`` ends."""
        with self._writing():
            if self._open.get(name):
                self._add(name, self._open[name].pop(), "E")

    def mark(self, what: str) -> None:
        """Record ``what`` as an instant event, if cycles are marked."""
        with self._writing():
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


def begin_by_environment(timeline: Timeline) -> None:
    """Start ``timeline`` at the file in ``HOROVOD_TIMELINE``, if it names one. Raises ValueError if it cannot."""
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path.upper() in ("", "DYNAMIC"):
        return
    try:
        timeline.start(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))
    except (OSError, ValueError) as error:
        raise ValueError(f"HOROVOD_TIMELINE is {path!r}, wanted a file that can be written: {error}") from None
