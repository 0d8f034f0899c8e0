"""Sections on training on one host and on shared steps; losses by method; figures of steps over slow links."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmark_page.reports import Report, Reports, by_processor, grouped, heading
from benchmark_page.tables import MISSING, Row, count, duration, megabytes, table, times

_DDP = "DDP"
_WHOLE = "all_reduce, fused step"
_RUN_OPTIONS = ("ranks", "rounds", "steps", "count", "batch", "millions", "widths", "busy", "nice")
_LEFT_OUT = ("DDP over pycomm", "DDP, pycomm's hook, TopK(0.01)")
"""Ways to train that the page does not show."""

Steps = dict[tuple[str, Any, str], float]
"""Seconds of a step by layout, link and method."""


def loss_table(reports: Reports) -> str:
    """Return the table of losses, compared with dense gradients."""
    by_optimizer = next(iter(reports.values()))["losses"]
    names = dict.fromkeys(name for found in by_optimizer.values() for name in found)
    lines = ["| method | " + " | ".join(by_optimizer) + " |", "|---" * (1 + len(by_optimizer)) + "|"]
    for name in names:
        cells = []
        for found in by_optimizer.values():
            change = f" ({100 * (found.get(name, 0.0) / found['dense'] - 1):+.1f} %)" if name != "dense" else ""
            cells.append(f"{found[name]:.3f}{change}" if name in found else "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def step_times(report: Report) -> Steps:
    """Return the seconds of a step by layout, link and method."""
    return {(_layout(row), row["link"], row["method"]): median(row["seconds"]) for row in report["rates"]}


def _layout(row: Report) -> str:
    per_host = row.get("per_host", 1)  # reports from before there were layouts lack it
    return f"{row['hosts']} hosts" + (f" x {per_host} ranks" if per_host > 1 else "")


def training(reports: Reports) -> str:
    """Show steps of a perceptron, memory, and what ``attach`` costs one rank, for each number of ranks."""
    parts = [
        heading("Training steps on one host", reports, _RUN_OPTIONS, "bench.training"),
        "Steps of a perceptron, one thread per rank; the slowest rank's time counts. With a barrier after backward, "
        "ranks wait for each other and exchange no data: no averaging can be faster. `sent` is a rank's payload per "
        "step. `memory` is what a rank keeps between steps, without model, gradients and optimizer state. On one host "
        '`shard="optimizer"` saves most, and compression costs more time than it saves.\n',
    ]
    for (ranks, parameters, batch, busy), group in grouped(reports, _training_setup).items():
        for label, report in by_processor(group).items():
            corner = f"{_ranks(ranks, busy)}, {parameters / 1e6:.1f} M parameters, batch {batch}"
            where = f" on {label}" if len(reports) > 1 else ""
            parts.append(table([[corner, "step", "faster than DDP", "sent", "memory"], *_steps(report)]))
            parts.append(f"With one rank{where}, `attach` changes the time of a step by {_overhead(report)}.\n")
    return "\n".join(parts)


def _training_setup(report: Report) -> tuple[Any, ...]:
    settings = report["settings"]
    return settings["ranks"], settings["parameters"], settings["batch"], settings.get("busy") or 0


def _ranks(ranks: int, busy: int) -> str:
    if not busy:
        return count(ranks, "rank")
    others = "another process that computes" if busy == 1 else f"{busy} other processes that compute"
    return f"{count(ranks, 'rank')} beside {others}"


def _steps(report: Report) -> list[Row]:
    seconds = {row["way"]: row["seconds"]["median"] for row in report["steps"]}
    memory = {row["way"]: megabytes(row["added"]) for row in report["memory"]}
    return [
        [
            row["way"],
            duration(seconds[row["way"]]),
            times(seconds[_DDP] / seconds[row["way"]]) if _DDP in seconds else MISSING,
            megabytes(row["bytes_sent"]) if row["bytes_sent"] else MISSING,
            memory.get(row["way"], MISSING),
        ]
        for row in report["steps"]
        if row["way"] not in _LEFT_OUT
    ]


def _overhead(report: Report) -> str:
    ratio = report["one_rank"]["ratio"]
    low, middle, high = (f"{100 * (ratio[key] - 1):+.1f} %" for key in ("p10", "median", "p90"))
    return f"{middle} (p10 to p90: {low} to {high})"


def sharding(reports: Reports) -> str:
    """Show the time of reduction and step, with a column for each report."""
    parts = [
        heading("Sharded optimizer", reports, _RUN_OPTIONS, "bench.sharding"),
        "Reduction and step of Adam in float32, one thread per rank: from the gradients that backward leaves to the "
        "new parameters of all ranks. In the first line each rank steps all parameters. "
        "[Sharded optimizer](sharding.md) describes the other ways.\n",
    ]
    heads, rows = [], dict[str, list[str]]()
    for (ranks, millions, busy), group in grouped(reports, _sharding_setup).items():
        for label, report in by_processor(group).items():
            where = f", {label}" if len(group) > 1 else ""
            heads.append(f"{_ranks(ranks, busy)}, {millions:g} M parameters{where}")
            for way, cell in _ways(report).items():
                rows.setdefault(way, [MISSING] * (len(heads) - 1)).append(cell)
    return "\n".join([*parts, table([["", *heads], *([way, *cells] for way, cells in rows.items())])])


def _sharding_setup(report: Report) -> tuple[Any, ...]:
    settings = report["settings"]
    return settings["ranks"], settings["millions"], settings.get("busy") or 0


def _ways(report: Report) -> dict[str, str]:
    measured = {way: found for way, found in report.items() if isinstance(found, dict) and "median" in found}
    seconds = {way: found["median"] for way, found in measured.items()}
    return {way: f"{duration(each)} ({times(seconds[_WHOLE] / each)})" for way, each in seconds.items()}
