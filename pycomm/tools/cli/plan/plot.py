"""Plots of plans: time against size by algorithm; throughput and efficiency against devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pycomm.schedule.choose import Ranking
from pycomm.untrusted import naming, one_line

if TYPE_CHECKING:
    from pycomm.parallel.planning.scaling import Fit

_LONGEST_NAME = 100  # characters
_STYLES = ("-", "--", ":", "-.")


def save_plot(ranking: Ranking, nbytes: float, path: Path) -> None:
    """Write a PNG to ``path``; ``nbytes`` is marked."""
    # Without pyplot: it would choose a window system, and keep the figure.
    figure = Figure(figsize=(12, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (name, _) in enumerate(ranking.at(nbytes)):
        sizes, times = ranking.curves[name]
        axes.plot(sizes, times, _STYLES[number // 10 % len(_STYLES)], color=f"C{number % 10}", label=_plain(name))
    axes.axvline(nbytes, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes of the array")
    axes.set_ylabel(f"seconds, {'measured' if ranking.measured else 'simulated'}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small", title="fastest first")
    figure.suptitle(f"all_reduce among {ranking.num_ranks} ranks, network {_plain(ranking.network.name)}")
    with naming(path):
        figure.savefig(path, format="png")


def _plain(name: str) -> str:
    """Return a name from a file as safe text for matplotlib: short, ASCII, and no formula."""
    return one_line(name[:_LONGEST_NAME]).encode("ascii", "replace").decode().replace("$", r"\$")


def save_scaling(fits: Sequence[Fit], points: Mapping[int, float], devices: Sequence[int], path: Path) -> None:
    """Write a PNG to ``path``: throughput and efficiency by each fit, and the measured points."""
    figure = Figure(figsize=(12, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    throughput, efficiency = figure.subplots(1, 2)
    for number, each in enumerate(fits):
        style = {"linestyle": _STYLES[number % len(_STYLES)], "color": f"C{number}"}
        throughput.plot(devices, [each.total(count) for count in devices], label=each.form, **style)
        efficiency.plot(devices, [100 * each.efficiency(count) for count in devices], **style)
    measured = list(points)
    throughput.plot(measured, [points[count] for count in measured], "ko", label="measured", zorder=3)
    one = fits[0].throughput
    efficiency.plot(measured, [100 * points[count] / (one * count) for count in measured], "ko", zorder=3)
    throughput.plot(devices, [one * count for count in devices], color="grey", linewidth=0.8, label="e = 1")
    for axes in (throughput, efficiency):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("devices")
        axes.grid(alpha=0.3)
    throughput.set_yscale("log")
    throughput.set_ylabel("throughput T = S N e")
    efficiency.set_ylabel("efficiency e, per cent")
    efficiency.set_ylim(bottom=0)
    throughput.legend(fontsize="small")
    with naming(path):
        figure.savefig(path, format="png")
