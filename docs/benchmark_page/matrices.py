"""Sections on optimizers of matrices: the time of a step, and loss against bytes."""

from __future__ import annotations

from statistics import mean, stdev

from benchmark_page.reports import Report, Reports, by_processor, heading, several
from benchmark_page.tables import Part, beside, count, duration, megabytes


def matrices(reports: Reports) -> str:
    """Show iterations by Muon, a table for each number of ranks."""
    settings = next(iter(reports.values()))["settings"]
    parts = [
        heading("Muon on several ranks", reports, ("ranks", "width", "layers", "batch", "rounds"), "bench.matrices"),
        f"Steps of a byte-level GPT of {settings['layers']} layers of width {settings['width']}, one thread per rank: "
        "the lowest processor time of the turns, with that of its messages, on the rank that needs most. The report "
        "has times, too; with more ranks than cores they say little. The optimizer: "
        "[Muon, SOAP and other matrix optimizers](matrix_optimizers.md).\n",
    ]
    found = by_processor(reports)
    for ranks in settings["ranks"]:
        shown = {label: report["by_ranks"][str(ranks)] for label, report in found.items()}
        parts.append(beside(count(ranks, "rank"), shown, _ways, several(reports)))
    return "\n".join(parts)


def _ways(by_way: Report) -> Part:
    rows = {
        way: [duration(min(each["cpu"]["samples"])), megabytes(each["state_bytes"])] for way, each in by_way.items()
    }
    return Part(["processor time", "state per rank"], rows)


def losses(reports: Reports) -> str:
    """Show losses and bytes of each method."""
    settings = next(iter(reports.values()))["settings"]
    parts = [
        heading("Muon: loss against bytes", reports, ("ranks", "steps", "seeds"), "bench.matrices.losses"),
        f"A byte-level GPT of 2 layers of width 64 on {count(settings['ranks'], 'rank')}, mean and deviation over "
        f"{count(settings['seeds'], 'seed')}; each method with the best of four learning rates. Bytes are what a rank "
        "sends per step: embeddings and head are a quarter of Muon's.\n",
        beside("method", by_processor(reports), _methods, several(reports)),
    ]
    return "\n".join(parts)


def _methods(report: Report) -> Part:
    rows = {}
    for method, found in report["methods"].items():
        values = [run["loss"] for run in found["runs"]]
        loss = f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
        sent, seconds = (mean(run[key] for run in found["runs"]) for key in ("bytes", "cpu"))
        rows[method] = [f"{found['rate']:g}", str(found["steps"]), loss, f"{sent / 1e3:.1f} kB", duration(seconds)]
    return Part(["rate", "steps", "loss", "bytes per step", "processor time per step"], rows)
