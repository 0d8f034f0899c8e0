"""The page on costs as work grows, and the lines of its picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark_page.reports import Report, Reports, fullest, origin
from benchmark_page.tables import Row, duration, megabytes, table

_AXES = {
    "ranks": ("ranks on one host", "100 parameters, 1 MB of gradients in 4 buckets"),
    "parameters": ("parameters", "4 MB of gradients in 4 buckets, two ranks"),
    "bytes": ("gradients", "8 parameters in 4 buckets, two ranks"),
    "buckets": ("buckets", "16 MB of gradients of 64 parameters, two ranks"),
}
"""What grows, and what stays the same then."""

_COSTS = {
    "attach": "time of `attach`",
    "requests": "different requests to the store in `attach`",
    "descriptors": "file descriptors",
    "shared": "shared memory of a rank",
    "private": "other memory that `attach` adds",
    "messages": "operations of the transport per step",
    "sent": "bytes sent per step",
    "host": "training thread's CPU time per step (without `attach`)",
}
_ALONE = {"host": "alone"}
"""What is shown beside a cost: the same before ``attach``."""
_SECONDS, _BYTES = ("attach", "host", "alone"), ("shared", "private", "sent")
_UNITS = {"bytes": {1 << 30: "GB", 1 << 20: "MB", 1 << 10: "KB"}}

_PAGE = """# Costs as work grows

Estimate what `attach` and a step cost with more ranks, parameters, bytes or buckets.

<!-- Written by python docs/benchmarks.py from bench/results: changes here are lost. -->

![Costs that grow with ranks, parameters, bytes and buckets, each divided by its first value](growth.svg)

- `attach` takes longer with more ranks (which share two cores here) and parameters. The first `attach` of a process
  takes about 80 ms more, for imports.
- Bytes sent and operations per step do not depend on the number of ranks or parameters.
- A rank's shared memory grows with its gradients, not with the number of ranks.

An **exponent** of 1 means proportional growth, 0 no growth. A fixed part of a cost does not
count. A test (`tests/bench/test_growth.py`) fails if the exponent of a count or of bytes is not
the expected one. Times are not tested: all ranks share the cores of one small machine.
"""

_SIMULATED = """## Simulated: all-reduce of 100 MB up to 4,096 ranks

`pycomm.schedule` counts what the busiest rank sends, and prices it on the described network "ethernet-10g".
[`pycomm plan ranks`](algorithms.md) does this for your network.
"""


def page(reports: Reports) -> str:
    """Return the page: a table of the costs that grow, and one of simulated all-reduces."""
    name = fullest(reports, lambda report: len(report["measured"]))
    report = reports[name]
    rows: list[Row] = [["", "cost", "from", "to", "exponent", "expected"]]
    command = (
        f"```sh\npython -m bench.growth --rounds {report['settings']['rounds']} --json bench/results/{name}\n```\n"
    )
    constant = "".join(
        f"- {words[0].capitalize()}: {words[1]}\n" for axis, words in _AXES.items() if axis in report["measured"]
    )
    return "\n".join(
        [
            _PAGE,
            command,
            f"{origin(name, report)[:-1]} It has all points and costs.\n",
            "## Costs that grow\n",
            f"While these grow, the rest stays constant:\n\n{constant}",
            table([*rows, *_rows(report)]),
            _SIMULATED,
            _simulated(report),
        ]
    )


def _rows(report: Report) -> Iterator[Row]:
    for axis, found in report["measured"].items():
        first, *_, last = labels_of(axis, found)
        for name in _growing(found):
            cost = found["costs"][name]
            ends = (_cell(name, cost["values"][end]) + _beside(found, name, end) for end in (0, -1))
            what = (
                f"{first} to {last} {_AXES[axis][0]}" if axis != "bytes" else f"{first} to {last} of {_AXES[axis][0]}"
            )
            yield [what, _COSTS[name], *ends, f"{cost['exponent']:.2f}", f"{cost['expected']:.2f}"]


def _beside(found: Mapping[str, Any], name: str, end: int) -> str:
    other = _ALONE.get(name)
    return f" ({_cell(other, found['costs'][other]['values'][end])})" if other in found["costs"] else ""


def _growing(found: Mapping[str, Any]) -> list[str]:
    """Return the names of the costs that should grow."""
    return [name for name in _COSTS if name in found["costs"] and found["costs"][name]["expected"] > 0]


def _simulated(report: Report) -> str:
    simulated: Mapping[str, Any] = report["simulated"] or {}
    rows: list[Row] = []
    for name, found in simulated.items():
        heads = [f"{ranks:,} ranks" for ranks in found["points"]]
        rows = rows or [["time (operations of a rank)", *heads]]
        counts, seconds = (found["costs"][cost]["values"] for cost in ("messages", "seconds"))
        cells = [f"{duration(each)} ({number:,.0f})" for each, number in zip(seconds, counts, strict=True)]
        rows.append([f"`{name}`", *cells])
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
    for name in _growing(found):
        cost = found["costs"][name]
        values = cost["values"]
        if values[0] > 0 and name != "private":  # what the allocator keeps hides what little there is
            label = f"{name}: {cost['exponent']:.2f} ({cost['expected']:.2f})"
            lines.append((label, found["points"], [value / values[0] for value in values]))
    return lines
