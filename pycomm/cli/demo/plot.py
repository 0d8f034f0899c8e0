"""Plot of the results: loss against time and against bytes, a curve per run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pycomm.cli.demo.figures import smoothed
from pycomm.cli.demo.messages import Results

_MB = 1e6


def save_plot(results: Results, title: str, path: Path) -> None:
    """Write a PNG to ``path``."""
    # Without pyplot: it would choose a window system, and keep the figure.
    figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for number, outcome in enumerate(results.outcomes):
        losses = smoothed(outcome)
        # Runs that compute the same lie on each other: a wide line below, narrower ones on top.
        style = {"color": f"C{number}", "linewidth": max(1.2, 3.6 - 1.2 * number), "alpha": 0.85}
        label = f"{outcome.label} (validation {outcome.validation_loss:.3f})"
        by_time.plot(np.cumsum(outcome.seconds), losses, label=label, **style)
        if outcome.bytes_sent[0] > 0:
            by_bytes.plot(np.array(outcome.bytes_sent) / _MB, losses, label=label, **style)
    _name_axes(by_time, "seconds of training")
    _name_axes(by_bytes, "MB that each rank handed to the transport")
    by_bytes.set_xscale("log")
    by_time.set_ylabel("training loss, nats per byte (running mean)")
    by_time.legend(loc="upper right")
    figure.suptitle(title)
    figure.savefig(path, format="png")


def _name_axes(axes: Axes, x: str) -> None:
    axes.set_xlabel(x)
    axes.grid(alpha=0.3)
