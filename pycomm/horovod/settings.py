"""Settings from Horovod's environment variables."""

from __future__ import annotations

import os
from datetime import timedelta

_WAIT = 3600.0
_TO_MEET = 120.0
_TO_COMPLAIN = 60.0
_CYCLE_MS = 1.0


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ValueError(f"{name} is {text!r} in the environment, wanted a number") from None


def timeout() -> timedelta:
    """Return the limit of a single wait for a rank that is alive: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, or an hour."""
    return timedelta(seconds=_number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or _WAIT)


def stall_check_seconds() -> float:
    """Return after how long a rank that waits says for whom: HOROVOD_STALL_CHECK_TIME_SECONDS; 0 for never."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        return 0.0
    return _number("HOROVOD_STALL_CHECK_TIME_SECONDS", _TO_COMPLAIN)


def meeting_seconds() -> float:
    """Return for how long ranks wait for each other in ``init()``: HOROVOD_GLOO_TIMEOUT_SECONDS, or two minutes."""
    return _number("HOROVOD_GLOO_TIMEOUT_SECONDS", _TO_MEET)


def cycle_seconds() -> float:
    """Return for how long operations that nobody waits for are collected: HOROVOD_CYCLE_TIME (in ms), or 1 ms."""
    return max(0.0, _number("HOROVOD_CYCLE_TIME", _CYCLE_MS)) * 1e-3
