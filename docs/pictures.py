"""Draws the pictures of the documentation that no bench draws.

    python docs/pictures.py                # writes the files of PICTURES into docs

`parallel_stages.svg` is drawn from a table as `pycomm.schedule.pipeline` makes it and `simulate` times it;
`benchmarks.svg` and `growth.svg` from the reports in bench/results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from benchmark_page.growth import labels_of, lines_of
from benchmark_page.headline import compared
from benchmark_page.reports import by_bench, load_reports
from benchmark_page.tables import span, times
from benchmarks import BENCHES, REPORTS
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from pycomm.schedule import pipeline as tables

FOLDER = Path(__file__).parent
COLORS = ("#7aa6dc", "#f2b06b", "#8ccb8c", "#d98c8c")
"""Of the devices."""
KIND_COLORS = {tables.FORWARD: "#7aa6dc", tables.BACKWARD: "#8ccb8c"}
INK = "#333333"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the pictures of the documentation")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write them (default: docs)")
    folder = parser.parse_args(arguments).folder
    mpl.rcParams["svg.hashsalt"] = "pycomm"  # the same bytes each time
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    for name, draw in PICTURES.items():
        figure = draw()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, facecolor="white")
        print(f"{name}.svg")


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


def benchmarks() -> Figure:
    """How many times as fast as its peer pycomm is; a bar for each processor's figure, below what it is of."""
    rows = list(compared(load_reports(REPORTS, BENCHES)))
    figure = Figure(figsize=(5, 3.9))  # phones show it at about this width
    axes = figure.add_axes((0.05, 0.09, 0.92, 0.9))
    for place, row in enumerate(reversed(rows)):
        speedups = row.speedups()
        for number, speedup in enumerate(speedups):
            color = COLORS[2] if speedup >= 1 else COLORS[3]
            height = 0.5 / len(speedups)
            axes.barh(place + 0.25 - height * (number + 0.5), speedup - 1, height * 0.9, left=1, color=color)
        text = span(speedups, times)
        axes.text(max(1, *speedups, 1) * 1.08, place, text, ha="left", va="center", fontsize=10, color=INK)
        axes.text(1, place + 0.3, f"{row.what}, against {row.whose}", ha="left", va="bottom", fontsize=9, color=INK)
    axes.set_yticks([])
    axes.set_ylim(-0.4, len(rows) - 0.2)
    axes.set_xscale("log")
    axes.set_xlim(0.98, 320)
    axes.set_xticks([1, 10, 100], [times(each) for each in (1, 10, 100)], fontsize=9)
    axes.minorticks_off()
    axes.axvline(1, color=INK, linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return figure


def architecture() -> Figure:
    """One rank: the script's step, the communication thread beside it, and how bytes reach the other ranks."""
    figure, axes = _canvas(8, 4.6, (16, 9.2))
    _say(axes, 0.2, 8.9, "your script", ha="left", size=9)
    for left, width, text in (
        (0.2, 2.6, "forward"),
        (2.9, 7.6, "backward()"),
        (10.6, 2.2, "wait"),
        (12.9, 2.9, "step()"),
    ):
        _box(axes, left, 7.2, width, 1.1, "#eeeeee" if text != "wait" else COLORS[3], text)
    _say(axes, 0.2, 6.0, "communication thread of pycomm:\nbuckets travel while\nbackward() still runs", ha="left")
    for number in range(3):
        left = 5.0 + 2.6 * number
        _box(axes, left, 5.0, 1.0, 1.1, COLORS[1], "pack", 8)
        _box(axes, left + 1.0, 5.0, 1.5, 1.1, COLORS[0], f"bucket {number}", 8)
        _arrow(axes, (left + 0.1, 7.15), (left + 0.1, 6.15))
    _say(axes, 4.9, 6.75, "gradients, last layers first", ha="right", size=7)
    _arrow(axes, (12.7, 6.15), (12.7, 7.15))
    _say(axes, 12.9, 6.75, "averages", ha="left", size=7)
    _say(axes, 0.2, 4.5, "what handles a bucket", ha="left", size=9)
    steps = (
        "reducer\nbuckets, checks,\nfault tolerance",
        "compression\nFP16, DGC, TopK,\nPowerSGD, ...",
        "communicator\nall-reduce:\nnative or a schedule",
    )
    transports = ("shared memory\nranks of one host", "NCCL\nGPUs", "torch.distributed\nhosts")
    axes.plot((2.0, 10.2), (1.7, 1.7), color=INK, linewidth=0.8)
    for number, (step, transport) in enumerate(zip(steps, transports, strict=True)):
        left = 0.2 + 4.1 * number
        _box(axes, left, 2.2, 3.6, 1.7, "#ffffff", step, 8)
        _box(axes, left, 0.2, 3.6, 1.0, COLORS[2], transport, 8)
        _arrow(axes, (left + 1.8, 1.7), (left + 1.8, 1.22))
        if number:
            _arrow(axes, (left - 0.45, 3.05), (left - 0.05, 3.05))
    axes.plot((10.2, 10.2), (1.7, 2.2), color=INK, linewidth=0.8)
    _box(axes, 13.2, 0.2, 2.6, 3.7, "#eeeeee", "the other\nranks")
    _arrow(axes, (12.1, 0.7), (13.15, 0.7))
    _arrow(axes, (13.15, 0.5), (12.1, 0.5))
    return figure


def growth() -> Figure:
    """Costs against what makes them grow, a panel each, with the fitted exponents and the expected ones."""
    report = next(iter(by_bench(load_reports(REPORTS, BENCHES))["growth"].values()))
    figure = Figure(figsize=(5, 9))  # phones show it at about this width
    for axes, (axis, found) in zip(figure.subplots(4, 1), report["measured"].items(), strict=True):
        for (label, points, values), marker in zip(lines_of(found), "os^vD*PX<>", strict=False):
            axes.plot(points, values, marker=marker, markersize=4, linewidth=1, label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(found["points"], labels_of(axis, found))
        axes.minorticks_off()
        axes.set_ylabel("times the first", fontsize=9)
        axes.set_title(f"{axis} (in the legend: exponent, expected)", fontsize=9, loc="left")
        axes.legend(fontsize=9)
        axes.tick_params(labelsize=9)
    figure.tight_layout()
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "parallel_layer": layer,
    "parallel_stages": stages,
    "parallel_both": both,
    "benchmarks": benchmarks,
    "architecture": architecture,
    "growth": growth,
}
"""What draws each file."""

if __name__ == "__main__":
    main()
