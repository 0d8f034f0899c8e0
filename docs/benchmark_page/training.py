"""Sections on training: steps on one host and over slow links, steps that ranks share, losses without lockstep."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from benchmark_page.reports import Report, Reports, by_processor, grouped, heading, several
from benchmark_page.tables import MISSING, Part, beside, count, duration, link, megabytes, on_each, times

_METHODS = {
    "compute": "no communication at all",
    "ddp": "DistributedDataParallel",
    "ddp-fp16": "DDP with its fp16 hook",
    "ddp-powersgd": "DDP with its PowerSGD hook",
    "dense": "pycomm, dense",
    "shard": 'pycomm, shard="optimizer"',
    "fp16": "pycomm, FP16",
    "bf16": "pycomm, BF16",
    "fp8": "pycomm, FP8",
    "int8": "pycomm, Int8",
    "int4": "pycomm, Int4",
    "powersgd": "pycomm, PowerSGD(4)",
    "dgc": "pycomm, DGC(0.001)",
    "auto": 'pycomm, "auto"',
}
_DDP = "DDP"
_WHOLE = "all_reduce, fused step"
_RUN_OPTIONS = ("ranks", "rounds", "steps", "count", "batch", "millions", "widths", "busy", "nice")

Steps = dict[tuple[str, Any, str], float]
"""Seconds of a step by layout, link and method."""


def losses(reports: Reports) -> str:
    """Show the loss by each method that auto may choose, and by some others."""
    top = heading("Loss by each method", reports, ("steps",), "bench.training.losses")
    return f"{top}\n{loss_table(reports)}\n[What auto chooses](compression.md#what-auto-chooses) says what of.\n"


def loss_table(reports: Reports) -> str:
    """Return the table of losses, against those of dense gradients."""
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


def slow_network(reports: Reports) -> str:
    """Show steps of every method by link, a table for each number of hosts."""
    parameters = " or ".join(dict.fromkeys(f"{report['parameters'] / 1e6:.1f} M" for report in reports.values()))
    made = "this report" if len(reports) == 1 else f"`{next(iter(reports))}`"
    text = (
        f"A byte-level language model of {parameters} parameters. Hosts are network namespaces "
        "with one rank each, unless the table says otherwise. A token bucket limits their link. They share the "
        "machine's cores. In brackets: how many "
        "times the rate of DistributedDataParallel on the same link; below 1 is slower. [Slow networks]"
        f"(slow_network.md) has every command that made {made}, the bytes on the wire, the spread, the losses.\n"
    )
    found = {label: step_times(report) for label, report in by_processor(reports).items()}
    parts = [heading("Training steps over slow links", reports), text]
    for hosts in sorted({key[0] for steps in found.values() for key in steps}, reverse=True):
        here = {label: steps for label, steps in found.items() if any(key[0] == hosts for key in steps)}
        parts.append(beside(hosts, here, partial(_steps_by_link, hosts=hosts), len(found) > 1))
    return "\n".join(parts)


def step_times(report: Report) -> Steps:
    """Return the seconds of a step by layout, link and method."""
    return {(_layout(row), row["link"], row["method"]): median(row["seconds"]) for row in report["rates"]}


def _layout(row: Report) -> str:
    per_host = row.get("per_host", 1)  # reports from before there were layouts lack it
    return f"{row['hosts']} hosts" + (f" x {per_host} ranks" if per_host > 1 else "")


def _steps_by_link(steps: Steps, hosts: str) -> Part:
    links = sorted({gbit for layout, gbit, _ in steps if layout == hosts}, key=lambda gbit: gbit or float("inf"))
    rows = {}
    for method, words in _METHODS.items():
        cells = [_against_ddp(steps, hosts, gbit, method) for gbit in links]
        if any(cells):
            rows[words] = cells
    return Part([link(gbit) for gbit in links], rows)


def _against_ddp(steps: Steps, hosts: str, gbit: Any, method: str) -> str:
    seconds, ddp = steps.get((hosts, gbit, method)), steps.get((hosts, gbit, "ddp"))
    if seconds is None:
        return ""
    return duration(seconds) + ("" if method in ("ddp", "compute") or ddp is None else f" ({times(ddp / seconds)})")


def training(reports: Reports) -> str:
    """Show steps of a perceptron, memory, and what ``attach`` costs one rank, for each number of ranks."""
    parts = [
        heading("Training steps on one host", reports, _RUN_OPTIONS, "bench.training"),
        "Steps of a perceptron, one thread per rank; the slowest rank's time counts. If every core runs a rank, "
        "packing and summing slow backward down. With a barrier after backward, ranks exchange no data but wait for "
        "each other: averaging alone cannot be faster. `sent` is the payload that a rank hands to its transport. "
        "Memory is a rank's memory between steps without model, gradients and the optimizer's state, also as a share "
        "of the gradients.\n",
    ]
    labelled = several(reports)
    for (ranks, parameters, batch, busy), group in grouped(reports, _training_setup).items():
        found = by_processor(group)
        corner = f"{_ranks(ranks, busy)}, {parameters / 1e6:.1f} M parameters, batch {batch}"
        parts.append(beside(corner, found, _steps, labelled))
        parts.append(beside(f"memory, {_ranks(ranks, busy)}", found, _memory, labelled))
        parts.append(
            "With one rank `attach` changes the time of a step by "
            f"{on_each(found, _overhead, labelled)}, from the 10th to the 90th percentile of the rounds.\n"
        )
    return "\n".join(parts)


def _training_setup(report: Report) -> tuple[Any, ...]:
    settings = report["settings"]
    return settings["ranks"], settings["parameters"], settings["batch"], settings.get("busy") or 0


def _ranks(ranks: int, busy: int) -> str:
    if not busy:
        return count(ranks, "rank")
    others = "another process that computes" if busy == 1 else f"{busy} other processes that compute"
    return f"{count(ranks, 'rank')} beside {others}"


def _steps(report: Report) -> Part:
    seconds = {row["way"]: row["seconds"]["median"] for row in report["steps"]}
    rows = {
        row["way"]: [
            duration(seconds[row["way"]]),
            times(seconds[_DDP] / seconds[row["way"]]) if _DDP in seconds else MISSING,
            megabytes(row["bytes_sent"]) if row["bytes_sent"] else MISSING,
        ]
        for row in report["steps"]
    }
    return Part(["step", "faster than DDP", "sent"], rows)


def _memory(report: Report) -> Part:
    rows = {row["way"]: [megabytes(row["added"]), f"{row['added'] / row['gradients']:.2f}"] for row in report["memory"]}
    return Part(["added", "of the gradients"], rows)


def _overhead(report: Report) -> str:
    ratio = report["one_rank"]["ratio"]
    low, middle, high = (f"{100 * (ratio[key] - 1):+.1f} %" for key in ("p10", "median", "p90"))
    return f"{middle} ({low} to {high})"


def sharding(reports: Reports) -> str:
    """Show phases of reduction and step, a table for each number of ranks."""
    parts = [
        heading("Sharded optimizer", reports, _RUN_OPTIONS, "bench.sharding"),
        "Reduction and step of Adam in float32, one thread per rank: from gradients as backward leaves them to the new "
        "parameters of all ranks. In the first line each rank takes the whole step. "
        "[Sharded optimizer](sharding.md) describes the others.\n",
    ]
    for (ranks, millions, busy), group in grouped(reports, _sharding_setup).items():
        corner = f"{_ranks(ranks, busy)}, {millions:g} M parameters"
        parts.append(beside(corner, by_processor(group), _phases, several(reports)))
    return "\n".join(parts)


def _sharding_setup(report: Report) -> tuple[Any, ...]:
    settings = report["settings"]
    return settings["ranks"], settings["millions"], settings.get("busy") or 0


def _phases(report: Report) -> Part:
    measured = {way: found for way, found in report.items() if isinstance(found, dict) and "median" in found}
    seconds = {way: found["median"] for way, found in measured.items()}
    rows = {way: [duration(each), times(seconds[_WHOLE] / each)] for way, each in seconds.items()}
    return Part(["time", "times as fast"], rows)


def asynchronous(reports: Reports) -> str:
    """Show the last losses of every method in three scenarios."""
    settings = next(iter(reports.values()))["settings"]
    text = (
        f"A byte-level language model on {settings['workers']} workers for {settings['seconds']:g} seconds: all alike, "
        "one ten times as slow, one away for a third of the time. [The experiment]"
        "(asynchronous_experiment.md) says what these methods are, and has plots, spreads, samples and bytes.\n"
    )
    found = by_processor(reports)
    return "\n".join(
        [
            heading("Asynchronous training and stragglers", reports),
            text,
            beside("last loss of", found, _last_losses, len(found) > 1),
        ]
    )


def _last_losses(report: Report) -> Part:
    rows = {}
    for method in dict.fromkeys(run["method"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["method"] == method and not run["tunes"]]
        cells = (
            [run["points"][-1][2] for run in runs if run["scenario"] == each] for each in ("alike", "slow", "away")
        )
        rows[method] = [f"{sum(losses) / len(losses):.3f}" if losses else MISSING for losses in cells]
    return Part(["all alike", "one slow", "one away"], rows)
