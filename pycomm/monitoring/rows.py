"""Rows: what happened between two looks at the counters of a Reducer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]

_PER_STEP = ("wait_seconds", "pack_seconds", "wire_seconds", "unpack_seconds")
_AS_IT_IS = (
    "compression_ratio",
    "compression_error",
    "residual_norm",
    "miss_rate",
    "nonfinite_steps",
    "last_nonfinite",
)

FIELDS = (
    "step",
    "time",
    "seconds",
    *_PER_STEP,
    "hidden_share",
    "bytes_sent",
    *_AS_IT_IS,
    "waited_for_rank",
    "waited_for_seconds",
)
"""Keys of a row, in the order of columns."""


def row_between(earlier: Mapping[str, Any], now: Mapping[str, Any], seconds: float, time: float) -> Row:
    """Return the row for the steps between two results of ``Reducer.stats``, ``seconds`` apart; see :func:`monitor`.

    What the later one does not have is ``None``; what only the earlier one does not have was not counted yet.
    """
    steps = now["steps"] - earlier.get("steps", 0)
    row: Row = dict.fromkeys(FIELDS)
    row["step"], row["time"], row["seconds"] = now["steps"], time, seconds / steps
    for key in (*_PER_STEP, "bytes_sent"):
        row[key] = (now[key] - earlier.get(key, 0)) / steps if key in now else None
    for key in _AS_IT_IS:
        row[key] = now.get(key)
    row["hidden_share"] = _hidden(row)
    row["waited_for_rank"], row["waited_for_seconds"] = _waited_for(earlier, now, steps)
    return row


def _hidden(row: Row) -> float | None:
    if row["pack_seconds"] is None or row["wait_seconds"] is None:
        return None
    busy = row["pack_seconds"] + row["wire_seconds"]
    exposed = max(0.0, row["wait_seconds"] - row["unpack_seconds"])
    return max(0.0, 1.0 - exposed / busy) if busy > 0.0 else None


def _waited_for(earlier: Mapping[str, Any], now: Mapping[str, Any], steps: int) -> tuple[int | None, float | None]:
    """Return the rank that the others have waited for longest, and for how long per step."""
    before = earlier.get("waits", {}).get("by_rank", {})
    costs = {
        rank: account["seconds"] - before.get(rank, {"seconds": 0.0})["seconds"]
        for rank, account in now.get("waits", {}).get("by_rank", {}).items()
    }
    if not costs:
        return None, None
    slowest = max(costs, key=costs.__getitem__)
    return slowest, costs[slowest] / steps
