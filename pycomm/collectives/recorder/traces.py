"""Traces: settings of ``pycomm trace`` for ranks, and the format of chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from typing import Any, TextIO

STEP = "PYCOMM_TRACE_STEP"
"""Environment variable that ``pycomm trace`` sets for its ranks: the step to trace."""
DEFAULT_STEP = 10


class ChromeTrace:
    """List of events, written to ``file`` one by one, so that a truncated trace is readable."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._separator = file, "[\n"

    def name_process(self, pid: int, name: str) -> None:
        """Name the process ``pid``."""
        self.add("process_name", "M", pid, args={"name": name})

    def name_row(self, pid: int, tid: int, name: str) -> None:
        """Name a row of a process."""
        self.add("thread_name", "M", pid, tid=tid, args={"name": name})

    def add(self, name: str, phase: str, pid: int, **more: Any) -> None:
        """Write an event of a ``phase``: B and E of a begin and an end, X of both, i of a mark. Times are in µs."""
        self._file.write(self._separator + json.dumps({"name": name, "ph": phase, "pid": pid, **more}))
        self._separator = ",\n"

    def end(self) -> None:
        """End the list. It has had one event or more."""
        self._file.write("\n]\n")
