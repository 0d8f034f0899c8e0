"""Draws the pictures of docs/parallel.md: one layer over devices, stages over devices, and both.

    python docs/pictures.py                # writes docs/parallel_layer.svg, parallel_stages.svg, parallel_both.svg

The second is drawn from a table as `pycomm.schedule.pipeline` makes it and `simulate` times it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from pycomm.schedule import pipeline as tables

FOLDER = Path(__file__).parent
COLORS = ("#7aa6dc", "#f2b06b", "#8ccb8c", "#d98c8c")
"""Of the devices."""
KIND_COLORS = {tables.FORWARD: "#7aa6dc", tables.BACKWARD: "#8ccb8c"}
INK = "#333333"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the pictures of docs/parallel.md")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write them (default: docs)")
    folder = parser.parse_args(arguments).folder
    mpl.rcParams["svg.hashsalt"] = "pycomm"  # the same bytes each time
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(folder / f"parallel_{name}.svg", metadata={"Date": None}, facecolor="white")
        print(f"parallel_{name}.svg")


def _canvas(width: float, height: float, limits: tuple[float, float]) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, limits[0])
    axes.set_ylim(0, limits[1])
    axes.axis("off")
    return figure, axes


def _box(axes: Any, x: float, y: float, width: float, height: float, color: str, text: str = "", size: int = 9) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=INK, linewidth=0.8))
    if text:
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color=INK, linewidth=0.8))


def _say(axes: Any, x: float, y: float, text: str, *, ha: str = "center", va: str = "top", size: int = 8) -> None:
    axes.text(x, y, text, ha=ha, va=va, fontsize=size, color=INK)


def layer() -> Figure:
    """One fully connected layer over four devices: each has a quarter of the columns, and of the output."""
    figure, axes = _canvas(8, 3.4, (16, 6.8))
    _box(axes, 0.6, 2.2, 1.0, 2.4, "#eeeeee", "x")
    _say(axes, 1.1, 1.7, "whole,\non every device")
    for device, color in enumerate(COLORS):
        left = 4.0 + 1.5 * device
        _box(axes, left, 1.6, 1.4, 3.6, color, f"W{device + 1}\n\nP / 4\nparameters", 8)
        _say(axes, left + 0.7, 5.5, f"device {device + 1}", va="bottom")
        _box(axes, 12.4, 4.4 - 0.8 * device, 1.1, 0.8, color, f"y{device + 1}", 8)
    _arrow(axes, (1.8, 3.4), (3.8, 3.4))
    _arrow(axes, (10.1, 3.4), (12.2, 3.4))
    _say(axes, 2.8, 3.6, "x W", va="bottom", size=9)
    _say(axes, 12.95, 1.6, "each device has its part:\nthe next layer's rows take it,\nor an all-gather joins them")
    _say(axes, 7.0, 1.2, "backward: all-reduce of the gradient of x")
    return figure


def stages() -> Figure:
    """Four stages on four devices, over time: one forward, one backward, eight microbatches."""
    ranks, microbatches, forward, backward = 4, 8, 1.0, 2.0
    table = tables.one_f_one_b(ranks, microbatches)
    run = tables.simulate(table, forward=forward, backward=backward)
    figure, axes = _canvas(8, 2.6, (run.seconds + 8.5, ranks + 1.6))
    for index in range(len(table)):
        rank, kind = int(table.rank[index]), int(table.kind[index])
        start, end = float(run.start[index]), float(run.end[index])
        text = str(int(table.microbatch[index]) + 1)
        _box(axes, 8 + start, ranks - rank, end - start, 0.9, KIND_COLORS[kind], text, 7)
    for rank in range(ranks):
        _say(axes, 7.7, ranks - rank + 0.45, f"device {rank + 1}, stage {rank + 1}", ha="right", va="center")
    bubble = 100 * run.bubble
    text = f"forward (blue), backward (green) of {microbatches} microbatches; white: bubble, {bubble:.0f} % of the time"
    _say(axes, 8, 0.55, text, ha="left", va="center")
    return figure


def both() -> Figure:
    """Eight devices: two replicas of two stages, each layer of which two devices share."""
    figure, axes = _canvas(8, 4.2, (16, 8.4))
    for replica in range(2):
        bottom = 4.5 - 3.6 * replica
        _say(axes, 0.2, bottom + 1.2, f"replica {replica + 1}:\nhalf of\nthe batch", ha="left", va="center")
        for stage in range(2):
            left = 2.6 + 7.0 * stage
            for part in range(2):
                device = 1 + part + 2 * replica + 4 * stage
                text = f"device {device}\nhalf of each layer"
                _box(axes, left + 2.6 * part, bottom, 2.5, 2.4, COLORS[2 * stage + part], text, 8)
            _say(axes, left + 2.55, bottom - 0.15, "tp: all-reduce in the layer")
        _arrow(axes, (7.8, bottom + 1.5), (9.5, bottom + 1.5))
        _arrow(axes, (9.5, bottom + 0.9), (7.8, bottom + 0.9))
        _say(axes, 8.65, bottom + 1.7, "pp: activations", va="bottom")
        _say(axes, 8.65, bottom + 0.4, "gradients", va="bottom")
    for stage in range(2):
        x = 5.15 + 7.0 * stage
        axes.annotate("", (x, 3.4), (x, 4.0), arrowprops={"arrowstyle": "<|-|>", "color": INK})
        _say(axes, x + 0.2, 3.65, "dp: gradients averaged", ha="left", va="center")
        _say(axes, x, 7.3, f"stage {stage + 1}", va="bottom", size=9)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {"layer": layer, "stages": stages, "both": both}

if __name__ == "__main__":
    main()
