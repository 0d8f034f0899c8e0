"""Sections on optimizers of matrices: the time of a step, and loss against bytes."""

from __future__ import annotations

from statistics import mean, stdev

from benchmark_page.reports import Report, Reports, fullest, heading
from benchmark_page.tables import Row, count, duration, megabytes, table


def matrices(reports: Reports) -> str:
    """Show iterations by Muon, with a column for each number of ranks, and the state with most ranks."""
    name = fullest(reports, lambda report: len(report["by_ranks"]))
    report = reports[name]
    settings = report["settings"]
    options = ("ranks", "width", "layers", "batch", "rounds")
    text = (
        f"Steps of a byte-level GPT of {settings['layers']} layers of width {settings['width']}, one thread per rank: "
        "the processor time of a step with its messages, on the rank that needs most (the lowest of the turns). With "
        "`shard`, each rank orthogonalizes only its part of the matrices: [Muon, SOAP and other matrix optimizers]"
        "(matrix_optimizers.md).\n"
    )
    most = settings["ranks"][-1]
    heads = [*(count(ranks, "rank") for ranks in settings["ranks"]), f"state, {count(most, 'rank')}"]
    rows: list[Row] = [["", *heads]]
    for way, last in report["by_ranks"][str(most)].items():
        found = [report["by_ranks"][str(ranks)][way] for ranks in settings["ranks"]]
        cells = [duration(min(each["cpu"]["samples"])) for each in found]
        rows.append([way.removeprefix("torch.optim.Muon, "), *cells, megabytes(last["state_bytes"])])
    return "\n".join([heading("Muon on several ranks", {name: report}, options, "bench.matrices"), text, table(rows)])


def losses(reports: Reports) -> str:
    """Show losses and bytes of each method."""
    name = fullest(reports, lambda report: len(report["methods"]))
    report = reports[name]
    settings = report["settings"]
    options = ("ranks", "steps", "seeds")
    text = (
        f"A byte-level GPT of 2 layers of width 64 on {count(settings['ranks'], 'rank')}, mean and deviation over "
        f"{count(settings['seeds'], 'seed')}; each method with the best of four learning rates. Bytes are what a rank "
        "sends per step.\n"
    )
    return "\n".join(
        [heading("Muon: loss against bytes", {name: report}, options, "bench.matrices.losses"), text, _methods(report)]
    )


def _methods(report: Report) -> str:
    rows: list[Row] = [["method", "steps", "loss", "bytes per step", "processor time per step"]]
    for method, found in report["methods"].items():
        values = [run["loss"] for run in found["runs"]]
        loss = f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
        sent, seconds = (mean(run[key] for run in found["runs"]) for key in ("bytes", "cpu"))
        rows.append([method, str(found["steps"]), loss, f"{sent / 1e3:.1f} kB", duration(seconds)])
    return table(rows)
