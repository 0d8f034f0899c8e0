"""The page on costs as work grows, and the section that leads to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark_page.reports import Report, Reports, by_processor, heading
from benchmark_page.tables import duration, megabytes, table

_AXES = {
    "ranks": "Ranks on one host: 100 parameters, 1 MB of gradients in 4 buckets",
    "parameters": "Parameters: 4 MB of gradients in 4 buckets, two ranks",
    "bytes": "Bytes of gradients: 8 parameters in 4 buckets, two ranks",
    "buckets": "Buckets: 16 MB of gradients of 64 parameters, two ranks",
}
_COSTS = {
    "attach": "time of `attach`",
    "requests": "different requests to the store in `attach`",
    "descriptors": "file descriptors",
    "left": "descriptors left after `detach`",
    "shared": "shared memory of a rank",
    "private": "other memory that `attach` adds",
    "messages": "operations of the transport in a step",
    "sent": "bytes sent in a step",
    "host": "processor time of the training thread in a step",
    "alone": "the same, before `attach`",
    "seconds": "time, simulated",
}
_SECONDS, _BYTES = ("attach", "host", "alone", "seconds"), ("shared", "private", "sent")
_UNITS = {"bytes": {1 << 30: "GB", 1 << 20: "MB", 1 << 10: "KB"}}

_PAGE = """# Costs as work grows

<!-- Written by python docs/benchmarks.py from bench/results: changes here are lost. -->

What do `attach` and a step cost with more ranks, more parameters, more bytes or more buckets? Each cost has a law. The
bench fits the exponent by which the cost really grows.

![Costs against ranks, parameters, bytes and buckets, each divided by its first value](growth.svg)

- An **exponent** of 1 means in proportion, 0 means that the cost stays the same. It is the slope, by least squares, of
  the logarithm of what the cost grew by against the logarithm of what its cause grew by, both since the first point. A
  fixed part, which nearly every cost has, does not count.
- The exponent of the **law** is fitted in the same way to its formula, at the same points.
- A test (`tests/bench/test_growth.py`) fails if an exponent of a count or of bytes is off its law. Times are only
  shown, because all ranks share the cores of one small machine. The first attach of a process takes about 80 ms more,
  in which it imports.
"""

_SIMULATED = """## Simulated: all-reduce of 100 MB up to 4,096 ranks

More ranks than one host can run are not measured. `pycomm.schedule` generates each algorithm's table, counts what the
busiest rank sends, and prices it on the described network "ethernet-10g". P is the number of ranks.
[`pycomm plan ranks`](algorithms.md) does this for your network.
"""


def growth(reports: Reports) -> str:
    """Show where the reports are from, and where their figures stand."""
    text = "[Costs as work grows](growth.md) has the figures, with their exponents and laws.\n"
    return heading("Costs as work grows", reports, ("rounds",), module="bench.growth") + "\n" + text


def page(reports: Reports) -> str:
    """Return the page: tables of each cost against ranks, parameters, bytes and buckets."""
    parts = [_PAGE]
    for label, report in by_processor(reports).items():
        suffix = f", {label}" if len(reports) > 1 else ""
        measured: Mapping[str, Any] = report["measured"]
        parts += [_section(f"{_AXES[axis]}{suffix}", axis, found) for axis, found in measured.items()]
    parts.append(_SIMULATED)
    first: Report = next(iter(reports.values()), {})
    for name, found in (first.get("simulated") or {}).items():
        parts.append(f"### {name}\n\n{_table('ranks', found)}")
    return "\n".join(parts)


def _section(title: str, axis: str, found: Mapping[str, Any]) -> str:
    return f"## {title}\n\n{_table(axis, found)}"


def _table(axis: str, found: Mapping[str, Any]) -> str:
    rows = [["", *labels_of(axis, found), "exponent", "law's", "law"]]
    for name, words in _COSTS.items():
        if name in found["costs"]:
            cost = found["costs"][name]
            cells = [_cell(name, value) for value in cost["values"]]
            rows.append([words, *cells, f"{cost['exponent']:.2f}", f"{cost['expected']:.2f}", cost["law"]])
    return table(rows)


def labels_of(axis: str, found: Mapping[str, Any]) -> list[str]:
    """Return the points of a curve as text."""
    return [_point(axis, point) for point in found["points"]]


def _point(axis: str, point: int) -> str:
    for unit, word in _UNITS.get(axis, {}).items():
        if point >= unit:
            return f"{point // unit} {word}"
    return f"{point:,}"


def _cell(name: str, value: float) -> str:
    if name in _SECONDS:
        return duration(value)
    if name in _BYTES:
        return f"{value / 1e3:.1f} KB" if abs(value) < 1e5 else megabytes(value)
    return f"{value:,.0f}"


def lines_of(found: Mapping[str, Any]) -> list[tuple[str, Sequence[int], list[float]]]:
    """Return a label, the points and the values, divided by the first one, of the costs to draw."""
    lines = []
    for name, cost in found["costs"].items():
        values = cost["values"]
        if values[0] > 0 and name != "private":  # what the allocator keeps hides what little there is
            label = f"{name}: {cost['exponent']:.2f} ({cost['expected']:.2f})"
            lines.append((label, found["points"], [value / values[0] for value in values]))
    return lines
