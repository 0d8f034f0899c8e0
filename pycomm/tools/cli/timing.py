"""Durations: statistics and text. Imports nothing of pycomm: benches use this file also where pycomm is not built."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one duration, in seconds; ``low`` and ``high`` are the 10th and 90th percentiles."""

    seconds: tuple[float, ...]

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Samples:
        return cls(tuple(seconds))

    @property
    def median(self) -> float:
        return float(np.percentile(self.seconds, 50))

    @property
    def low(self) -> float:
        return float(np.percentile(self.seconds, 10))

    @property
    def high(self) -> float:
        return float(np.percentile(self.seconds, 90))

    def as_json(self) -> dict[str, float | list[float]]:
        return {"median": self.median, "p10": self.low, "p90": self.high, "samples": list(self.seconds)}

    def cells(self) -> list[str]:
        """Write the median, then the spread from the 10th to the 90th percentile."""
        return [duration(self.median), f"{duration(self.low)} - {duration(self.high)}"]


def busy_note(own: int) -> str:
    """Return a note if ``own`` threads that compute and others that run now are more than the cores; "" if not."""
    cores, running = os.cpu_count() or 1, []
    for _ in range(5):  # the least of a few: others may only be passing by
        running.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
        time.sleep(0.02)
    others = min(running) - 1
    if others < 1 or own + others <= cores:
        return ""
    return f"the cores are busy: {others} other threads run on {cores} cores, so times are too long, and differ"


def duration(seconds: float) -> str:
    """Write a duration with three significant digits, in us or ms."""
    value, unit = (seconds * 1e6, "us") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def times(ratio: float) -> str:
    """Write a ratio: "4.20x"."""
    if ratio < 0.1:
        return f"{ratio:.2g}x"
    return f"{ratio:.{2 if ratio < 10 else 1 if ratio < 100 else 0}f}x"


def rate_text(bytes_per_second: float) -> str:
    """Write the rate of a link in bits per second, with three digits."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
