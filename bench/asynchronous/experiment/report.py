"""Report of the experiment: tables for people, a page for the docs, a plot for each scenario."""

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
PAGE = "asynchronous_experiment.md"
Content = Mapping[str, Any]
Curve = list[tuple[float, float]]


def plot_name(scenario: str) -> str:
    """Return the name of the plot's file."""
    return f"asynchronous_{scenario}.png"


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
    """Return the methods that were measured, in the order in which they are told."""
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
    """Write the page, and a plot for each scenario."""
    parts = [_INTRODUCTION, _findings(content), _measured(content)]
    for scenario, words in SCENARIOS.items():
        header, rows = scenario_table(content, scenario)
        parts.append(f"## {words[0].upper()}{words[1:]}\n")
        parts.append(_markdown(header, rows))
        save_plot(content, scenario, folder / plot_name(scenario))
        parts.append(f"![Loss against seconds and against samples: {words}]({plot_name(scenario)})\n")
    (folder / PAGE).write_text("\n".join(parts), encoding="utf-8")
    print(f"{folder / PAGE} written")


_INTRODUCTION = """# Asynchronous training and stragglers: an experiment

<!-- Written by python -m bench.asynchronous.experiment --docs docs: changes here are lost. -->

What do asynchronous methods gain where one worker is slow or away, and what do they cost in loss where none is?
"""


def _measured(content: Content) -> str:
    settings = content["settings"]
    rates = ", ".join(f"{rate:g}" for rate in settings["rates"])
    return f"""## How it was measured

On {content["headline"]}, by this command:

    python -m bench.asynchronous.experiment --seconds {settings["seconds"]:g} --pace {settings["pace"]:g} --seeds \
{settings["seeds"]} --json bench/results/asynchronous.json --docs docs

- **Model**: the byte-level GPT of `pycomm demo`, width {WIDTH}, {LAYERS} layers, on the standard library's source;
  {BATCH} x {CONTEXT} bytes a step and worker; {settings["workers"]} workers, and one process more where there is a
  server. Methods with a server and those without one were trained side by side, and some while the machine had other
  work, too: the column "samples" says how many steps there was time for.
- **Seconds**: a worker's step takes {1000 * settings["pace"]:g} ms. It sleeps most of that time, as if it computed on a
  device of its own. The slow worker's step takes ten times as long. The experiment is about who waits for whom;
  [Parameter servers](parameter_server.md) says what an exchange costs.
- **Learning rates** of AdamW: the best of {rates} for each method, {TUNED_IN_WORDS}, with the first seed. Nothing else
  was tuned. Local SGD and DiLoCo average every {EVERY} steps. Outer optimizers have the rate {OUTER[0]} and the
  momentum {OUTER[1]}, the best ones for `bench.asynchronous --losses`. With the papers' 0.7 and 0.9, and so few
  averages, DiLoCo came to a loss of 2.8.
- **Losses** are those of held-out text, in nats per byte. The parameters are the server's, those of the last average,
  or (for gossip) the ranks' mean. Means of {settings["seeds"]} seeds ± standard deviation.
- Methods that make equally many steps on all workers make as many as the slowest worker has time for.
- **Samples** are windows of text, of all workers together. Losses at equal samples are interpolated between
  measurements.
"""


def _findings(content: Content) -> str:
    """Show the loss at the end of each method in each scenario, the least one in bold."""
    names = methods_of(content)
    columns = [[_loss_at_the_end(content, scenario, name) for name in names] for scenario in SCENARIOS]
    rows = [
        [
            METHODS[name].label,
            *(f"**{losses[i]:.2f}**" if losses[i] == min(losses) else f"{losses[i]:.2f}" for losses in columns),
        ]
        for i, name in enumerate(names)
    ]
    text = "Validation loss at the end of equal time; the least in each column is bold.\n"
    return "\n".join(["## Results\n", text, _markdown(["method", *SCENARIOS.values()], rows)])


def _loss_at_the_end(content: Content, scenario: str, name: str) -> float:
    """Return the mean over the seeds."""
    return float(mean(run["points"][-1][2] for run in runs_of(content, scenario, name)))


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def save_plot(content: Content, scenario: str, path: Path) -> None:
    """Draw the loss against seconds and against samples, the mean over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    styles = ["-", "--", ":"]
    for number, name in enumerate(methods_of(content)):
        runs = runs_of(content, scenario, name)
        for axes, against in zip(panels, ("seconds", "samples"), strict=True):
            curves = [curve_of(run, against) for run in runs]
            points = list(zip(*curves, strict=False))
            x, y = ([mean(point[i] for point in at) for at in points] for i in range(2))
            axes.plot(x, y, styles[number // 10], label=METHODS[name].label, linewidth=1.4)
    for axes, against in zip(panels, ("seconds", "samples"), strict=True):
        axes.set_xlabel(against)
        axes.grid(visible=True, alpha=0.3)
    panels[1].set_xscale("symlog", linthresh=1000)
    panels[0].set_ylabel("validation loss, nats per byte")
    panels[1].legend(fontsize="x-small", loc="upper right")
    figure.savefig(path, format="png", dpi=100)
