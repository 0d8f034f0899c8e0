"""Plot of ``pycomm plan ranks``: time against size by algorithm."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from pycomm.schedule.choose import Ranking
from pycomm.untrusted import naming, one_line

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
