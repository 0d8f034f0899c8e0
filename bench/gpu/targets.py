"""Targets of ``bench.gpu``. They are ratios, which should hold on any data-center GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """Limit that ``row[figure]`` should reach, from above or below; ``text`` is how it is printed."""

    figure: str
    text: str
    limit: float
    at_least: bool

    def reached_by(self, row: dict[str, Any]) -> bool:
        value: float = row[self.figure]
        return value >= self.limit if self.at_least else value <= self.limit


COPY = Target("share_of_copy_bandwidth", ">= 85 % of copy", 0.85, at_least=True)
BUCKET_COPY = Target("share_of_copy_bandwidth", ">= 60 % of copy", 0.60, at_least=True)  # where launches still count
COLD_READS = Target("time_over_floor", "<= 2.5 reads", 2.5, at_least=False)
WARM_READS = Target("time_over_floor", "<= 1.4 reads", 1.4, at_least=False)
TEN_TIMES = Target("times_faster", ">= 10x torch", 10.0, at_least=True)
FOUR_TIMES = Target("times_faster", ">= 4x torch", 4.0, at_least=True)
BUCKET_BYTES = 25 << 20
PEAK = Target("over_ddp_bytes", "<= DDP's + a bucket", BUCKET_BYTES, at_least=False)
OVERHEAD = Target("overhead", "<= 2 % of a step", 0.02, at_least=False)


def judged(row: dict[str, Any], target: Target | None) -> dict[str, Any]:
    """Return ``row`` with ``target`` (its text) and ``reached``; both ``None`` where something is only measured."""
    if target is None:
        return {**row, "target": None, "reached": None}
    return {**row, "target": target.text, "reached": target.reached_by(row)}
