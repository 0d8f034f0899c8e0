"""Report of the experiment: tables for people, a page for the docs, a plot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.asynchronous.experiment.methods import EVERY, METHODS, OUTER, SCENARIOS, TUNED_IN
from bench.asynchronous.experiment.trainee import BATCH, CONTEXT, LAYERS, WIDTH
from pycomm.tools.cli.table import print_table

TUNED_IN_WORDS = f"where {SCENARIOS[TUNED_IN]}"
PLOTTED = "slow"
"""The scenario of the plot."""

PAGE, PLOT = "asynchronous_experiment.md", f"asynchronous_{PLOTTED}.png"
Content = Mapping[str, Any]
Curve = list[tuple[float, float]]


def print_report(content: Content) -> None:
    """Print all tables."""
    for scenario, words in SCENARIOS.items():
        print(f"\n{words}, {content['settings']['seconds']:g} s")
        print_table(*scenario_table(content, scenario))


def runs_of(content: Content, scenario: str, method: str) -> list[Mapping[str, Any]]:
    """Return the runs that count."""
    return [
        run for run in content["runs"] if (run["scenario"], run["method"]) == (scenario, method) and not run["tunes"]
    ]


def methods_of(content: Content) -> list[str]:
    """Return the methods that were measured, in the order of the tables."""
    return [name for name in METHODS if any(run["method"] == name and not run["tunes"] for run in content["runs"])]


def common_samples(content: Content, scenario: str) -> int:
    """Return the largest number of samples after which every run of a scenario has been validated."""
    runs = [run for name in methods_of(content) for run in runs_of(content, scenario, name)]
    return min((run["points"][-1][1] for run in runs), default=0) * BATCH


def loss_at(curve: Curve, x: float) -> float:
    """Return the loss at ``x``, on straight lines between the points; NaN outside."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return math.nan


def curve_of(run: Mapping[str, Any], against: str) -> Curve:
    """Return the losses against "seconds" or "samples"."""
    if against == "seconds":
        return [(at, loss) for at, _, loss in run["points"]]
    return [(steps * BATCH, loss) for _, steps, loss in run["points"]]


def scenario_table(content: Content, scenario: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a scenario's table."""
    common, rows = common_samples(content, scenario), []
    for name in methods_of(content):
        runs = runs_of(content, scenario, name)
        last = [run["points"][-1][2] for run in runs]
        same = [loss_at(curve_of(run, "samples"), common) for run in runs]
        samples = mean(run["steps"] for run in runs) * BATCH
        sent = mean(run["bytes"] for run in runs)
        cells = [
            f"{runs[0]['lr']:g}",
            _with_spread(last),
            f"{samples:,.0f}",
            _with_spread(same),
            f"{sent / 1e6:,.0f} MB",
        ]
        rows.append([METHODS[name].label, *cells])
    return ["method", "rate", "loss at the end", "samples", f"loss at {common:,} samples", "sent"], rows


def _with_spread(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def write_docs(folder: Path, content: Content) -> None:
    """Write the page and its plot."""
    save_plot(content, folder / PLOT)
    (folder / PAGE).write_text("\n".join([_INTRODUCTION, _findings(content), _measured(content)]), encoding="utf-8")
    print(f"{folder / PAGE} written")


_INTRODUCTION = f"""# Asynchronous training and stragglers: an experiment

Choose a training method for workers of which one is slow or sometimes absent.

<!-- Written by python -m bench.asynchronous.experiment --docs docs: changes here are lost. -->

![Validation loss against seconds: {SCENARIOS[PLOTTED]}]({PLOT})
"""


def _measured(content: Content) -> str:
    settings = content["settings"]
    rates = ", ".join(f"{rate:g}" for rate in settings["rates"])
    return f"""## How it was measured

On {content["headline"]}, by this command:

    python -m bench.asynchronous.experiment --seconds {settings["seconds"]:g} --pace {settings["pace"]:g} --seeds \
{settings["seeds"]} --json bench/results/asynchronous.json --docs docs

- **Model**: the byte-level GPT of `pycomm demo`, width {WIDTH}, {LAYERS} layers; {BATCH} x {CONTEXT} bytes per step and
  worker; {settings["workers"]} workers, and one process more for a server.
- **Time**: a worker's step takes {1000 * settings["pace"]:g} ms, most of which it sleeps, as if it computed on its own
  device. [Parameter servers](parameter_server.md) says what an exchange costs.
- **Learning rates** of AdamW: the best of {rates} per method, {TUNED_IN_WORDS},
  with the first seed. Nothing else was tuned. Local SGD, DiLoCo and elastic averaging average every {EVERY} steps;
  DiLoCo's outer optimizer has the rate {OUTER[0]} and the momentum {OUTER[1]}.
- **Losses** are measured on held-out text, in nats per byte, with the server's parameters, the last average of the
  parameters or (for gossip) the mean over the ranks: means of {settings["seeds"]} seeds.
- Methods with and without a server were trained side by side. Methods that make equally many steps on all workers make
  as many as the slowest worker has time for. The report has samples, bytes and losses at equal samples.
"""


def _findings(content: Content) -> str:
    """Show the loss at the end of each method in each scenario, the least one in bold, and what was sent."""
    names = methods_of(content)
    columns = [[_loss_at_the_end(content, scenario, name) for name in names] for scenario in SCENARIOS]
    first = next(iter(SCENARIOS))
    rows = [
        [
            METHODS[name].label,
            *(f"**{losses[i]:.2f}**" if losses[i] == min(losses) else f"{losses[i]:.2f}" for losses in columns),
            f"{mean(run['bytes'] for run in runs_of(content, first, name)) / 1e6:,.0f} MB",
        ]
        for i, name in enumerate(names)
    ]
    header = ["method", *SCENARIOS.values(), f"sent, {SCENARIOS[first]}"]
    return "\n".join(["## Results\n", _CONCLUSIONS, _markdown(header, rows)])


_CONCLUSIONS = """Validation loss after equal time, the lowest in each column in bold, and bytes sent by all processes.

- If all workers are equally fast, train synchronously. Local SGD sends a tenth of the bytes, at a higher loss.
- If a worker is always slow, use `Sync(backup=1)` or `Async`: methods that wait for the slow worker fall far behind.
- If a worker is absent for some time, `Sync(backup=1)` is as good as synchronous training.
"""


def _loss_at_the_end(content: Content, scenario: str, name: str) -> float:
    """Return the mean over the seeds."""
    return float(mean(run["points"][-1][2] for run in runs_of(content, scenario, name)))


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def save_plot(content: Content, path: Path) -> None:
    """Draw the loss against seconds, the mean over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")  # phones show it at about this width
    axes = figure.subplots()
    styles = ["-", "--", ":"]
    for number, name in enumerate(methods_of(content)):
        curves = [curve_of(run, "seconds") for run in runs_of(content, PLOTTED, name)]
        points = list(zip(*curves, strict=False))
        x, y = ([mean(point[i] for point in at) for at in points] for i in range(2))
        axes.plot(x, y, styles[number // 10], label=METHODS[name].label, linewidth=1.4)
    axes.grid(visible=True, alpha=0.3)
    axes.set_xlabel("seconds")
    axes.set_ylabel("validation loss, nats per byte")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, format="png", dpi=120)
