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
from pycomm.cli.table import print_table

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
    return ["", "rate", "loss at the end", "samples by then", f"loss at {common:,} samples", "sent"], rows


def _with_spread(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def write_docs(folder: Path, content: Content) -> None:
    """Write the page, and a plot for each scenario."""
    parts = [_introduction(content), _findings(content)]
    for scenario, words in SCENARIOS.items():
        header, rows = scenario_table(content, scenario)
        parts.append(f"## {words[0].upper()}{words[1:]}\n")
        parts.append(_markdown(header, rows))
        save_plot(content, scenario, folder / plot_name(scenario))
        parts.append(f"![Loss against seconds and against samples: {words}]({plot_name(scenario)})\n")
    (folder / PAGE).write_text("\n".join(parts), encoding="utf-8")
    print(f"{folder / PAGE} written")


def _introduction(content: Content) -> str:
    settings = content["settings"]
    rates = ", ".join(f"{rate:g}" for rate in settings["rates"])
    return f"""# Training without lockstep: an experiment

Written by `python -m bench.asynchronous.experiment --docs docs`; do not edit. Measured with

    python -m bench.asynchronous.experiment --seconds {settings["seconds"]:g} --pace {settings["pace"]:g} --seeds \
{settings["seeds"]} --json bench/results/asynchronous.json --docs docs

on {content["headline"]}.

- **Model**: the byte-level GPT of `pycomm demo`, width {WIDTH}, {LAYERS} layers, on the standard library's source;
  {BATCH} x {CONTEXT} bytes a step and worker; {settings["workers"]} workers, and one process more where there is a
  server. Methods with a server and those without one were trained side by side, and some while the machine had other
  work, too: the samples by then say how many steps there was time for.
- **Seconds**: a worker's step takes {1000 * settings["pace"]:g} ms, for most of which it sleeps, as if it computed on a
  device of its own; the slow worker's takes ten times as long. So this is about who waits for whom, and what it does to
  the loss; what exchanges cost is in [Parameter servers](parameter_server.md).
- **Learning rates** of AdamW: of {rates} the best one for each method, {TUNED_IN_WORDS}, first seed. Nothing else
  was tuned here: ranks that average less often meet every {EVERY} steps; outer optimizers have the rate {OUTER[0]} and
  the momentum {OUTER[1]}, which were the best for `bench.asynchronous --losses` (with the papers' 0.7 and 0.9, in so
  few meetings, DiLoCo came to 2.8 and ranks that meet one by one to 3 and more).
- **Losses** are those of text that was not trained on, in nats per byte: of the servers' parameters, of the center or
  of what ranks last agreed on, of the ranks' mean (gossip). Means of {settings["seeds"]} seeds ± standard deviation.
- Where all workers make equally many steps, their number is what the slowest can make in the time.
- **Samples** are windows of text, of all workers together; losses at equal samples lie on straight lines between
  measurements.
"""


def _findings(content: Content) -> str:
    """Say who is best in each scenario, and how far synchronous training and the cheapest method are from that."""
    lines = ["## What it says\n"]
    for scenario, words in SCENARIOS.items():
        found = {name: _of_method(content, scenario, name) for name in methods_of(content)}
        first, cheapest = (min(found, key=lambda name, i=i: found[name][i]) for i in (0, 2))  # type: ignore[misc]
        parts = [f"{METHODS[first].label} ends with the least loss, {found[first][0]:.2f}"]
        for name in dict.fromkeys(("sync", "async", "quorum", cheapest)):
            if name in found and name != first:
                loss, samples, sent = found[name]
                shares = f"{samples / found[first][1]:.0%} of its samples and {sent / found[first][2]:.0%} of its bytes"
                parts.append(f"{METHODS[name].label} with {loss:.2f}, after {shares}")
        lines.append(f"- Where {words}, {'; '.join(parts)}.")
    return "\n".join(lines) + "\n"


def _of_method(content: Content, scenario: str, name: str) -> tuple[float, float, float]:
    """Return the mean loss at the end, samples and bytes."""
    runs = runs_of(content, scenario, name)
    return (
        mean(run["points"][-1][2] for run in runs),
        mean(run["steps"] for run in runs),
        mean(r["bytes"] for r in runs),
    )


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
