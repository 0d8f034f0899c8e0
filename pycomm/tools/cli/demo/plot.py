"""Plots of the results: steps per second on this host, loss against time over the slow link, and a killed rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pycomm.tools.cli.demo.results import Death, Results, RunOutcome, smoothed, speed
from pycomm.untrusted import naming


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
    rates = [1.0 / run.step_seconds for run in runs]
    bars = axes.bar([run.label.replace("(", "(\n") for run in runs], rates, color=[f"C{i}" for i in range(len(runs))])
    axes.bar_label(bars, [f"{speed(run, runs[0]).value:.2f}x" for run in runs])
    axes.set(title="This host", ylabel="steps per second")


def _draw_losses(axes: Axes, runs: list[RunOutcome], link: str) -> None:
    for number, run in enumerate(runs):
        label = f"{run.label}: {run.step_seconds * 1e3:.0f} ms per step"
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
