"""What docs/recommended_stack.md has from the report of ``bench.recommended_stack``: its origin, and a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from benchmark_page.reports import Report, Reports, origin
from benchmark_page.tables import Row, link, megabytes, span, table

_LEFT_OUT = ("without scaling", "without masters, scaling", "without blocks, dgc", "without dgc, lars")
"""What the page does not show."""
_PART = re.compile(r"(<!-- stack: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_OPTIONS = ("links", "hosts", "seeds", "epochs", "rates", "tuning_seeds")


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(mean(values), stdev(values) if len(values) > 1 else 0.0)


def filled(page: str, reports: Reports) -> str:
    """Return the page with what stands between its markers as the report has it.

    Raises:
        ValueError: there is more than one report, or a marker names no part.
    """
    if len(reports) != 1:
        raise ValueError(f"{', '.join(reports)}: docs/recommended_stack.md shows one report")
    ((name, report),) = reports.items()

    def fill(match: re.Match[str]) -> str:
        if match[2] == "origin":
            return match[1] + _origin(name, report) + match[4]
        if match[2] not in _PARTS:
            raise ValueError(f"recommended_stack.md has a part {match[2]!r}, wanted origin or {', '.join(_PARTS)}")
        return match[1] + _PARTS[match[2]](report) + match[4]

    return _PART.sub(fill, page)


def _origin(name: str, report: Report) -> str:
    options = " ".join(_option(key, report["settings"][key]) for key in _OPTIONS)
    reason = report["simulated"]
    how = "Links were limited for real." if reason is None else f"Seconds on links are **simulated** ({reason})."
    return (
        f"```sh\npython -m bench.recommended_stack {options} --json bench/results/{name}\n```\n\n"
        f"{how} {origin(name, report)}"
    )


def _option(name: str, value: Any) -> str:
    text = ",".join(f"{each or 0:g}" for each in value) if isinstance(value, list) else f"{value:g}"
    return f"--{name.replace('_', '-')} {text}"


def _spread(report: Report, name: str, key: str) -> Spread:
    """Return what the seeds gave: of losses once each, as they do not depend on the link."""
    by_seed: dict[int, list[float]] = {}
    for row in (row for row in report["runs"] if row["name"] == name):
        by_seed.setdefault(row["seed"], []).append(row[key])
    return Spread.of([mean(values) for values in by_seed.values()])


def _results(report: Report) -> str:
    """Show losses, accuracy, bytes and seconds of each recipe."""
    gbits = sorted({row["link"] for row in report["runs"]}, key=lambda gbit: gbit or float("inf"))
    heads = ["training loss", "test accuracy", "on the wire, of a host", *(f"run, {link(gbit)}" for gbit in gbits)]
    rows: list[Row] = [["", *heads]]
    for name in dict.fromkeys(row["name"] for row in report["runs"]):
        if name not in _LEFT_OUT:
            loss, accuracy = (_spread(report, name, key) for key in ("loss", "accuracy"))
            cells = [
                f"{loss.mean:.4f} ± {loss.deviation:.4f}",
                f"{100 * accuracy.mean:.2f} ± {100 * accuracy.deviation:.2f} %",
                megabytes(_spread(report, name, "wire_bytes").mean),
            ]
            rows.append([name, *cells, *(span(_seconds(report, name, gbit), "{:.1f} s".format) for gbit in gbits)])
    return table(rows)


def _seconds(report: Report, name: str, gbit: Any) -> list[float]:
    return [row["seconds"] for row in report["runs"] if (row["name"], row["link"]) == (name, gbit)]


_PARTS: Mapping[str, Callable[[Report], str]] = {"results": _results}
