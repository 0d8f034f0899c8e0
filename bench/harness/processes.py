"""Processes in sessions of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any


def kill_session(process: subprocess.Popen[Any]) -> int:
    """Kill ``process`` with whatever it has started in its session; returns its exit status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
