"""Table and picture of the results, and conclusions from them."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from pycomm.tools.cli.demo.results import Death, Results, RunOutcome, smoothed, speed
from pycomm.tools.cli.demo.settings import HOST_METHODS, LINK_METHODS, DemoSettings
from pycomm.tools.cli.table import table
from pycomm.untrusted import naming

_HEADER = ["", "step", "speed vs DDP", "middle\nhalf", "sent per\nstep", "loss"]
_SAME_LOSS = 1.01
"""A run whose loss is at most this many times DDP's has reached it."""


def show(results: Results, settings: DemoSettings, console: Console) -> None:
    """Print title, table, notes and conclusions."""
    for text in (f"\n{title(results, settings)}\n", table(_HEADER, rows_of(results, settings))):
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    console.print("\n" + notes(results, settings) + "\n", style="dim", highlight=False, markup=False)
    for line in conclusions(results, settings):
        console.print(line, highlight=False, markup=False)


def title(results: Results, settings: DemoSettings) -> str:
    """Return what was trained."""
    return (
        f"{results.num_parameters / 1e6:.2f} M parameters, {settings.ranks} ranks of one thread, "
        f"{settings.batch} x {settings.context} bytes of text per rank and step"
    )


def rows_of(results: Results, settings: DemoSettings) -> list[list[str]]:
    """Return the rows of the table: for each part its name, then its runs."""
    rows = []
    for name, runs in (("This host", results.host), (link_name(settings), results.link)):
        rows.append([name, *[""] * (len(_HEADER) - 1)])
        rows += [_row(run, runs[0]) for run in runs]
    if results.death is not None:
        rows += _rows_of_death(results.death)
    return rows


def link_name(settings: DemoSettings) -> str:
    """Return the title of the slow link's part."""
    return f"{settings.link[0].upper()}{settings.link[1:].replace(' of', ',')}"


def _row(run: RunOutcome, ddp: RunOutcome) -> list[str]:
    faster = speed(run, ddp)
    return [
        f" {run.label}",
        _duration(ddp.step_seconds / faster.value),  # not the median of its own steps, which need not agree
        f"{_times(faster.value)}x",
        "" if run is ddp else f"{_times(faster.low)}-{_times(faster.high)}",
        "-" if run.wire_bytes is None else f"{run.wire_bytes / 1e6:.2f} MB",
        f"{run.validation_loss:.3f}",
    ]


def _rows_of_death(death: Death) -> list[list[str]]:
    losses = smoothed(death.losses)
    before, after = death.seconds[: death.step - 1], death.seconds[death.step :]
    parts = (
        (f" {death.ranks} ranks, {len(before)} steps", before, losses[death.step - 2]),
        (f" rank {death.ranks - 1} is killed", [death.seconds[death.step - 1]], losses[death.step - 1]),
        (f" {death.ranks - 1} ranks, {len(after)} steps", after, losses[-1]),
    )
    head = ["survive=pycomm.Survive()", *[""] * (len(_HEADER) - 1)]
    return [head, *([name, _duration(statistics.median(s)), "", "", "-", f"{x:.3f}"] for name, s, x in parts)]


def notes(results: Results, settings: DemoSettings) -> str:
    """Return the meaning of the columns."""
    sent = "counted by a host's network interface" if settings.hosts else "what a rank gives to its transport"
    simulated = "" if settings.hosts else " A simulated step takes its time here plus the network model's."
    return (
        "Runs take turns, each for the same number of seconds. Speeds are compared turn by turn (median, and middle "
        "half of the turns), without the warm-up. The step of DDP is the median of the slowest rank; the others' is "
        f"that divided by the speed. Sent is {sent}. The loss is the final validation loss in nats per byte "
        f"({results.initial_loss:.3f} untrained).{simulated}"
    )


def conclusions(results: Results, settings: DemoSettings) -> list[str]:
    """Return three sentences: what was faster than DDP, what was not, and what to write."""
    faster: list[str] = []
    others: list[str] = []
    for where, (ddp, *runs) in (("on this host", results.host), (f"over the {settings.link}", results.link)):
        for run in runs:
            ratio = speed(run, ddp)
            if run.label.startswith("DDP"):
                continue
            (faster if ratio.is_clearly_higher else others).append(f"{run.label} {where} ({_times(ratio.value)}x)")
    gained = f"Gained: more steps per second than DDP by {_listed(faster)}" if faster else "Gained: nothing in this run"
    lost = f"by {_listed(others)}" if others else "nowhere in this run"
    return [f"{gained}{_time_to_loss(results)}.", f"Not gained: {lost}.", _advice(results)]


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _time_to_loss(results: Results) -> str:
    """Say when DGC reached DDP's final loss, unless it lost it again."""
    ddp, dgc = results.link[0], results.link[-1]
    seconds = dgc.seconds_to(float(smoothed(ddp.losses)[-1]))
    if seconds is None or seconds >= ddp.seconds[-1] or dgc.validation_loss > ddp.validation_loss:
        return ""
    return f"; {dgc.label} reached DDP's final training loss after {seconds:.1f} s instead of {ddp.seconds[-1]:.1f} s"


def _advice(results: Results) -> str:
    """Name the fastest run of each part, if it was clearly faster than DDP and reached its loss in the same time."""
    parts = []
    for where, methods, runs in (
        ("on one host", HOST_METHODS, results.host),
        ("over slow links", LINK_METHODS, results.link),
    ):
        ratios = {
            method: ratio.value
            for method, run in zip(methods, runs, strict=True)
            if (ratio := speed(run, runs[0])).is_clearly_higher
            and not method.ddp
            and run.validation_loss <= _SAME_LOSS * runs[0].validation_loss
        }
        parts.append(f"{where} {max(ratios, key=lambda method: ratios[method]).advice if ratios else 'keep DDP'}")
    survive = "; survive=pycomm.Survive() where ranks may die" if results.death is not None else ""
    return f"Write: {'; '.join(parts)}{survive}."


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def save_plot(results: Results, title: str, link: str, path: Path) -> None:
    """Write a PNG to ``path``.

    Args:
        link: name of the slow link's part.
    """
    # Without pyplot: it would choose a window system, and keep the figure.
    panels = 2 if results.death is None else 3
    figure = Figure(figsize=(5.5 * panels, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    host, slow, *rest = figure.subplots(1, panels)
    _draw_speeds(host, results.host)
    _draw_losses(slow, results.link, link)
    if results.death is not None:
        _draw_death(rest[0], results.death)
    figure.suptitle(title)
    with naming(path):
        figure.savefig(path, format="png")


def _draw_speeds(axes: Axes, runs: list[RunOutcome]) -> None:
    rates = [speed(run, runs[0]).value / runs[0].step_seconds for run in runs]
    bars = axes.bar([run.label.replace("(", "(\n") for run in runs], rates, color=[f"C{i}" for i in range(len(runs))])
    axes.bar_label(bars, [f"{speed(run, runs[0]).value:.2f}x" for run in runs])
    axes.set(title="This host", ylabel="steps per second")


def _draw_losses(axes: Axes, runs: list[RunOutcome], link: str) -> None:
    for number, run in enumerate(runs):
        label = f"{run.label}: {_duration(runs[0].step_seconds / speed(run, runs[0]).value)} per step"
        axes.plot(run.seconds, smoothed(run.losses), color=f"C{number}", label=label, linewidth=2.0, alpha=0.85)
    axes.set(title=link, xlabel="seconds of training", ylabel="training loss, nats per byte (running mean)")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")


def _draw_death(axes: Axes, death: Death) -> None:
    steps = np.arange(1, 1 + len(death.losses))
    axes.plot(steps, smoothed(death.losses), color="C0")
    axes.axvline(death.step, color="C3", linestyle="--", label=f"rank {death.ranks - 1} is killed")
    axes.set(
        title=f"{death.ranks} ranks, then {death.ranks - 1}",
        xlabel="step",
        ylabel="training loss of rank 0 (running mean)",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
