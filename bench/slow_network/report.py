"""Report of ``bench.slow_network``: tables for people, a page for the docs, a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.timing import Samples, duration, times
from bench.slow_network.figures import (
    Figures,
    Link,
    Rate,
    Target,
    combined,
    first_at_most,
    hosts_name,
    link_name,
    seconds_to,
    target_loss,
    targets,
)
from bench.slow_network.methods import COMPUTE, DDP, METHODS, label_of
from pycomm.tools.cli.table import print_table

Table = tuple[list[str], list[list[str]]]
"""A header and rows."""

_CHOICES = "buckets_"  # how such counters of Reducer.stats() begin

PAGE, PLOT = "slow_network.md", "slow_network.png"


def print_report(figures: Figures, settings: Mapping[str, Any]) -> None:
    """Print all tables."""
    for hosts, per_host, link in figures.cells():
        print(f"\nstep times, {hosts_name(hosts, per_host)}, {link_name(link)}")
        print_table(*rate_table(figures, hosts, per_host, link))
    for hosts in _trained_hosts(figures):
        print(f"\nlosses, {hosts} hosts, {_num_steps(figures, hosts)} steps; {_target_words(figures, hosts, settings)}")
        print_table(*loss_table(figures, hosts, settings["target_fraction"]))
    print("\ntargets")
    print_table(*target_table(targets(figures)))
    for failure in figures.failures:
        where = f"{failure.what}, {hosts_name(failure.hosts, failure.per_host)}, {link_name(failure.link)}"
        print(f"\nnot measured: {label_of(failure.method)} ({where}):\n{failure.error}")
    for line in differences(figures):
        print(line)


def rate_table(figures: Figures, hosts: int, per_host: int, link: Link) -> Table:
    """Return the step times of all methods on one kind of link."""
    rates = [rate for rate in figures.rates if (rate.hosts, rate.per_host, rate.link) == (hosts, per_host, link)]
    ddp = figures.rate(hosts, link, DDP, per_host)
    rows = []
    for rate in rates:
        ratio = "-" if ddp is None else times(ddp.step_seconds / rate.step_seconds)
        name = label_of(rate.method) + _choice(rate)
        rows.append([name, *Samples.of(rate.seconds).cells(), ratio, _wire_cell(rate), _goodput(rate)])
    return ["method", "step", "p10 - p90", "rate vs DDP", "on the wire per step and host", "Mbit/s"], rows


def _choice(rate: Rate) -> str:
    """Say what "auto" had chosen in the end: buckets by method."""
    chosen = {key: count for key, count in rate.stats.items() if key.startswith(_CHOICES)}
    words = [f"{key.removeprefix(_CHOICES)} x{count}" for key, count in chosen.items()]
    return f" ({', '.join(words)})" if words else ""


def _wire_cell(rate: Rate) -> str:
    return "-" if rate.method == COMPUTE else _megabytes(rate.wire_bytes)


def _goodput(rate: Rate) -> str:
    """Say how much of the link a method uses, over the whole step."""
    return "-" if rate.method == COMPUTE else f"{8e-6 * rate.wire_bytes / rate.step_seconds:.0f}"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.{3 if count < 1e7 else 1}f} MB"


def loss_table(figures: Figures, hosts: int, fraction: float) -> Table:
    """Return final losses, and combined seconds to the target loss on every link."""
    target = target_loss(figures, hosts, fraction)
    links = figures.links(hosts)
    rows = []
    for name in [name for name in METHODS if any(c.method == name and c.hosts == hosts for c in figures.curves)]:
        curves = [c for c in figures.curves if (c.method, c.hosts) == (name, hosts)]
        curve = next((c for c in curves if c.link is None), curves[0])
        steps = None if target is None else first_at_most(curve.points, target)
        own = statistics.median(curve.seconds)
        cells = [f"{curve.final_loss:.3f}", "never" if steps is None else f"{steps:.0f}", duration(own)]
        rows.append([label_of(name), *cells, *(_seconds_cell(figures, hosts, link, name, target) for link in links)])
    header = ["", "final loss", "steps to target", "step of that run"]
    return [*header, *(f"s to target, {link_name(link)}" for link in links)], rows


def _seconds_cell(figures: Figures, hosts: int, link: Link, name: str, target: float | None) -> str:
    if figures.rate(hosts, link, name) is None or figures.curve(hosts, link, name) is None or target is None:
        return "-"
    seconds = seconds_to(figures, hosts, link, name, target)
    return "never" if seconds is None else f"{seconds:.1f}"


def target_table(rows: Sequence[Target]) -> Table:
    """Return what was wanted and what was measured."""
    return ["", "goal", "measured", "reached"], [
        [
            row.what,
            f"{'>=' if row.at_least else '<='} {row.wanted:.2f}{row.unit}",
            "-" if row.measured is None else f"{row.measured:.3f}{row.unit}",
            {True: "yes", False: "NO", None: "not measured"}[row.reached],
        ]
        for row in rows
    ]


def differences(figures: Figures) -> list[str]:
    """Return a line for each run whose replicas are not equal, which must not be."""
    return [
        f"REPLICAS DIFFER: {label_of(row.method)}, {row.hosts} hosts, {link_name(row.link)}: {row.difference}"
        for row in figures.unequal()
    ]


def _trained_hosts(figures: Figures) -> list[int]:
    return sorted({curve.hosts for curve in figures.curves})


def _num_steps(figures: Figures, hosts: int) -> int:
    return max(curve.num_steps for curve in figures.curves if curve.hosts == hosts)


def _target_words(figures: Figures, hosts: int, settings: Mapping[str, Any]) -> str:
    target = target_loss(figures, hosts, settings["target_fraction"])
    if target is None:
        return "no target loss, as no dense run was measured"
    return (
        f"the target loss is {target:.3f}, the dense run's after {100 * settings['target_fraction']:g} % of its steps; "
        "seconds are combined: steps to it times the step time on the link, and its time for what warming up sent more"
    )


# The page.


def write_docs(folder: Path, figures: Figures, settings: Mapping[str, Any], headline: str) -> None:
    """Write ``PAGE`` and, if anything was trained, ``PLOT``."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [_INTRODUCTION, _findings(figures), _measured(figures, settings, headline), *_rate_sections(figures)]
    for hosts in _trained_hosts(figures):
        parts.append(f"## Losses, {hosts} hosts, {_num_steps(figures, hosts)} steps\n")
        parts.append(_sentence(_target_words(figures, hosts, settings)))
        parts.append(_markdown(loss_table(figures, hosts, settings["target_fraction"])))
    if figures.curves and figures.rates:
        save_plot(figures, folder / PLOT)
        parts.append(f"![Validation loss against combined seconds of training, one panel per link]({PLOT})\n")
    (folder / PAGE).write_text("\n".join(parts), encoding="utf-8")
    print(f"{folder / PAGE} written")


_INTRODUCTION = """# Training over slow links

<!-- Written by python -m bench.slow_network --docs docs: changes here are lost. -->

How much faster is a training step with compressed gradients, and what does compression cost in loss? A language model
was trained on hosts whose links have 100 Mbit/s, 1 Gbit/s, or no limit.
"""


def _measured(figures: Figures, settings: Mapping[str, Any], headline: str) -> str:
    commands = "\n".join(f"    {command}" for command in settings["commands"])
    return f"""## How it was measured

On {headline}, as root on Linux, by these commands:

{commands}

- **Hosts** are network namespaces. Each has a full-duplex link, limited by a token bucket, and one rank of one thread
  unless the table says otherwise. They share the machine's cores and memory: only the links are slow.
- **Model**: the byte-level GPT of `pycomm demo`, {figures.parameters / 1e6:.2f} M parameters, on the standard library's
  source; {settings["batch"]} x {settings["context"]} bytes per rank and step. SGD, learning rate {settings["lr"]:g} \
(ramp, then half a cosine), momentum
  {settings["momentum"]:g} for every method; DGC applies it itself.
- **Step times** are medians after {settings["warm_up"]} steps of warm-up. The slowest rank's time counts. All methods
  run in the same processes and take turns. "No communication" is the same step without averaging.
- **Bytes on the wire** are counted by the hosts' network interfaces.
- **Losses** are measured on the same validation text, outside of the training time. A method learns the same whatever
  the link, so each was trained once, on unlimited links. "auto" chooses by the link, so it was trained on each.
- **Seconds to a loss are combined**: number of steps in the training run times step time on the link. Where a method
  sends more while it warms up, the link's time for those bytes is added.
- The ranks' parameters were compared after every run: {_equality(figures)}.
"""


def _equality(figures: Figures) -> str:
    return "; ".join(differences(figures)) or "equal to the bit in all of them"


def _findings(figures: Figures) -> str:
    """Show how many times DDP's rate each method has; then what failed, and the targets."""
    lines = ["## Results\n", "Steps per second, relative to DDP on the same hosts and link. Below 1 is slower.\n"]
    lines.append(_markdown(_ratio_table(figures)))
    for failure in figures.failures:
        last = failure.error.strip().splitlines()[-1]
        where = f"{failure.what}, {hosts_name(failure.hosts, failure.per_host)}, {link_name(failure.link)}"
        lines.append(f"- Not measured: {label_of(failure.method)} ({where}) failed: `{last}`")
    goals = "The project set itself goals before it measured:\n"
    return "\n".join([*lines, goals, _markdown(target_table(targets(figures)))])


def _ratio_table(figures: Figures) -> Table:
    """Return the rate of each method relative to DDP's, with a column for each kind of host and link."""
    found = {(r.method, r.hosts, r.per_host, r.link): r.step_seconds for r in figures.rates}
    cells = [cell for cell in figures.cells() if figures.rate(cell[0], cell[2], DDP, cell[1]) is not None]
    rows = []
    for name in METHODS:
        if name == DDP or all((name, *cell) not in found for cell in cells):
            continue
        ratios = [
            times(found[(DDP, *cell)] / found[(name, *cell)]) if (name, *cell) in found else "-" for cell in cells
        ]
        rows.append([label_of(name), *ratios])
    header = [f"{hosts_name(hosts, per_host)}, {link_name(link)}" for hosts, per_host, link in cells]
    return ["method", *header], rows


def _rate_sections(figures: Figures) -> list[str]:
    return [
        f"## Step times, {hosts_name(hosts, per_host)}, {link_name(link)}\n\n"
        + _markdown(rate_table(figures, hosts, per_host, link))
        for hosts, per_host, link in figures.cells()
    ]


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}.\n"


def _markdown(table: Table) -> str:
    header, rows = table
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def save_plot(figures: Figures, path: Path) -> None:
    """Plot loss against combined seconds, one panel per link, with the most hosts that were trained with."""
    # Here, not above, and without pyplot: only this needs matplotlib; pyplot would choose a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    hosts = _trained_hosts(figures)[-1]
    links = figures.links(hosts)
    figure = Figure(figsize=(4.6 * max(1, len(links)), 4.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(1, len(links)), sharey=True, squeeze=False)[0]
    for axes, link in zip(panels, links, strict=False):
        for name, points in _lines(figures, hosts, link).items():
            color, style = f"C{list(METHODS).index(name)}", ":" if name.startswith(DDP) else "-"
            axes.plot(*zip(*points, strict=True), label=label_of(name), color=color, linestyle=style, linewidth=1.4)
        axes.set(title=f"{hosts} hosts, {link_name(link)}", xlabel="seconds of training (combined)", xscale="log")
        axes.xaxis.set_minor_formatter(NullFormatter())  # or the labels of short axes lie on each other
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss, nats per byte")
    panels[-1].legend(fontsize="small")
    figure.savefig(path, format="png")


def _lines(figures: Figures, hosts: int, link: Link) -> dict[str, list[tuple[float, float]]]:
    """Return what can be drawn, by method; without the start, for which a logarithmic axis has no place."""
    found = {}
    for name in METHODS:
        rate, curve = figures.rate(hosts, link, name), figures.curve(hosts, link, name)
        if rate is not None and curve is not None:
            points = [point for point in combined(curve, rate)[1:] if math.isfinite(point[1])]
            if points:
                found[name] = points
    return found
