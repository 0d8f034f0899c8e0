"""Plot of a plan: time against size, a curve per algorithm."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pycomm.schedule.choose import Ranking

_STYLES = ("-", "--", ":", "-.")


def save_plot(ranking: Ranking, nbytes: float, path: Path) -> None:
    """Write a PNG to ``path``; ``nbytes`` is marked."""
    # Without pyplot: it would choose a window system, and keep the figure.
    figure = Figure(figsize=(12, 6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (name, _) in enumerate(ranking.at(nbytes)):
        sizes, times = ranking.curves[name]
        axes.plot(sizes, times, _STYLES[number // 10 % len(_STYLES)], color=f"C{number % 10}", label=name)
    axes.axvline(nbytes, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("bytes of the array")
    axes.set_ylabel(f"seconds, {'measured' if ranking.measured else 'simulated'}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small", title="fastest first")
    figure.suptitle(f"all_reduce among {ranking.num_ranks} ranks, network {ranking.network.name}")
    figure.savefig(path, format="png")
