"""Cost of looking: rows of ``pycomm.monitor``, and operations that the flight recorder notes, in parts of a step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import pycomm
from bench.harness.timing import stopwatch
from pycomm.collectives.recorder.watch import watch

EVERY = 50
"""Steps from one row to the next."""
_CALLS = 2000


class _Nothing:
    """Transport whose operations do nothing."""

    rank = 0

    def all_reduce(self, x: Any, op: str, timeout: float) -> None:
        """Return at once."""


def seconds_to_note() -> float:
    """Return what noting takes per operation: of one that does nothing, watched and not."""
    x, watched = torch.ones(256), _Nothing()
    plain = watched.all_reduce
    watch(watched, "bench", (0, 1))
    found = {name: _seconds_per_call(call, x) for name, call in (("watched", watched.all_reduce), ("plain", plain))}
    return found["watched"] - found["plain"]


def _seconds_per_call(call: Callable[..., None], x: torch.Tensor) -> float:
    def calls() -> None:
        for _ in range(_CALLS):
            call(x, "sum", 1.0)

    return median(stopwatch(calls) for _ in range(9)) / _CALLS


def cost_of_monitoring(reducer: pycomm.Reducer, step: Callable[[], None], steps: int) -> dict[str, float]:
    """Return seconds: of a ``step``, of one row, of noting an operation; and the number of ``operations`` of a step."""
    communicators = reducer._engine.lanes
    with tempfile.TemporaryFile("w", buffering=1) as file:
        rows: list[float] = []
        with pycomm.monitor(reducer, every=10**9, to=lambda row: file.write(json.dumps(row) + "\n")) as monitor:
            before = sum(each.channel.recorder.count for each in communicators)
            seconds = []
            for _ in range(steps):
                seconds.append(stopwatch(step))
                rows.append(stopwatch(monitor.write))
        count = sum(each.channel.recorder.count for each in communicators) - before
    return {"step": median(seconds), "row": median(rows), "note": seconds_to_note(), "operations": count / steps}


def share(cost: dict[str, float]) -> float:
    """Return the part of a step that rows every ``EVERY`` steps and notes take."""
    return (cost["row"] / EVERY + cost["operations"] * cost["note"]) / cost["step"]
