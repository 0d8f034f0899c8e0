"""Report of ``bench.slow_network``: tables for people, a page for the docs, a plot."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
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
from bench.slow_network.methods import COMPUTE, CONTROL, DDP, METHODS, label_of
from pycomm.tools.cli.table import print_table

Table = tuple[list[str], list[list[str]]]
"""A header and rows."""

_CHOICES = "buckets_"  # how such counters of Reducer.stats() begin

PAGE, PLOT = "slow_network.md", "slow_network.png"
_WIDTH = 120


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

_COLUMNS: tuple[tuple[int, int, Link], ...] = (
    (4, 1, 0.1),
    (4, 1, 1.0),
    (4, 1, None),
    (2, 1, 1.0),
    (8, 1, 1.0),
    (2, 2, 1.0),
)
"""Hosts, ranks of each and link of what the page shows."""


def write_docs(folder: Path, figures: Figures, settings: Mapping[str, Any], headline: str) -> None:
    """Write ``PAGE`` and, if anything was trained, ``PLOT``."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [_INTRODUCTION]
    if figures.curves and figures.rates:
        save_plot(figures, folder / PLOT)
        parts.append(f"![Validation loss against combined seconds of training, one panel per link]({PLOT})\n")
    parts.append(_findings(figures))
    for hosts in _trained_hosts(figures):
        parts.append(f"## Losses, {hosts} hosts, {_num_steps(figures, hosts)} steps\n")
        parts.append(_LOSSES.format(target=_target_words(figures, hosts, settings).partition(";")[0]))
        parts.append(_markdown(loss_table(figures, hosts, settings["target_fraction"])))
    parts.append(_measured(figures, settings, headline))
    (folder / PAGE).write_text(_wrapped("\n".join(parts)), encoding="utf-8")
    print(f"{folder / PAGE} written")


_INTRODUCTION = """# Training over a slow network

Choose a compression method for your link, by what it gains in step time and costs in loss.

<!-- Written by python -m bench.slow_network --what page --docs docs: changes here are lost. -->
"""

_CONCLUSIONS = (
    "- DGC (for SGD) takes the fastest steps of all methods but the control; its final loss is higher. To the target "
    "loss on 100 Mbit/s, PowerSGD is ahead, because DGC sends more while it warms up.\n"
    "- Int4, Int8 and FP8 train as well as dense gradients here, and gain on 1 Gbit/s. Without a limit, only DGC gains "
    "clearly.\n"
    "- Dense gradients are as fast as with DDP, and faster if hosts have several ranks: pycomm reduces within each "
    "host first.\n"
    '- `compression="auto"` (last choice in brackets) works with any optimizer. It is not always the fastest method.\n'
    "- TopK without error feedback is a control: it shows what dropped gradients cost in loss.\n"
)

_LOSSES = (
    "A method learns the same on every link, so each was trained once; {target}. Seconds are **combined**: steps to "
    "the target times the step time on the link, and the link's time for additional bytes of the warm-up.\n"
)


def _measured(figures: Figures, settings: Mapping[str, Any], headline: str) -> str:
    lines = [
        "## How it was measured\n",
        f"On {headline}, as root on Linux, by these commands. `bench/results/slow_network.json` has all links and "
        "methods, with each step's time.\n",
        *(f"    {_alone(command)}" for command in settings["commands"]),
        "",
        "- **Hosts** are network namespaces with one rank of one thread, unless the column says otherwise. They share "
        "the machine's cores and memory. A token bucket limits each full-duplex link.",
        f"- **Model**: the byte-level GPT of `pycomm demo`, {figures.parameters / 1e6:.2f} M parameters; "
        f"{settings['batch']} x {settings['context']} bytes per rank and step. SGD, learning rate {settings['lr']:g} "
        f"(ramp, then half a cosine), momentum {settings['momentum']:g}, which DGC applies itself.",
        f"- **Step times** are medians after {settings['warm_up']} steps of warm-up, on the slowest rank. All methods "
        'take turns in the same processes. "No communication" is the same step without averaging.',
        "- **Bytes on the wire** are counted by the hosts' network interfaces. **Losses** are validation losses in "
        "nats per byte.",
        f"- The ranks' parameters were compared after every run: {_equality(figures)}.\n",
    ]
    return "\n".join(lines)


def _alone(command: str) -> str:
    """Return a command without the options that make it add to the figures of earlier ones."""
    return re.sub(r" --(?:from|out|docs) \S+", "", command)


def _equality(figures: Figures) -> str:
    return "; ".join(differences(figures)) or "they were equal to the bit in all of them"


def _findings(figures: Figures) -> str:
    """Show the steps of each method, and how many times DDP's rate that is; then what failed, and missed goals."""
    columns = [cell for cell in _COLUMNS if cell in figures.cells()] or figures.cells()
    lines = [
        "## Step times\n",
        "In brackets: the step rate relative to DDP on the same hosts and link; below 1 is slower. "
        f"{_ddp_speed(figures)}\n",
        _markdown(_step_table(figures, columns)),
    ]
    for failure in figures.failures:
        last = failure.error.strip().splitlines()[-1]
        where = f"{failure.what}, {hosts_name(failure.hosts, failure.per_host)}, {link_name(failure.link)}"
        lines.append(f"- Not measured: {label_of(failure.method)} ({where}) failed: `{last}`")
    return "\n".join([*lines, _CONCLUSIONS, _goals(targets(figures))])


def _step_table(figures: Figures, columns: Sequence[tuple[int, int, Link]]) -> Table:
    """Return a column for each kind of host and link, and the bytes on the wire of the first."""
    rows = []
    for name in [COMPUTE, *METHODS]:
        found = [figures.rate(hosts, link, name, per_host) for hosts, per_host, link in columns]
        if any(found):
            cells = [_step_cell(figures, rate) for rate in found]
            sent = next(rate for rate in found if rate is not None)
            rows.append([label_of(name), *cells, _wire_cell(sent)])
    heads = [f"{hosts_name(hosts, per_host)}, {link_name(link)}" for hosts, per_host, link in columns]
    return ["", *heads, f"sent per host and step, {hosts_name(*columns[0][:2])}"], rows


def _step_cell(figures: Figures, rate: Rate | None) -> str:
    if rate is None:
        return "-"
    ddp = figures.rate(rate.hosts, rate.link, DDP, rate.per_host)
    if ddp is None or rate.method in (DDP, COMPUTE):
        return duration(rate.step_seconds) + _choice(rate)
    return f"{duration(rate.step_seconds)} ({times(ddp.step_seconds / rate.step_seconds)}){_choice(rate)}"


def _ddp_speed(figures: Figures) -> str:
    """Say how fast links without a limit are, by what DDP sends."""
    speeds = [
        f"{8e-9 * rate.wire_bytes / rate.step_seconds:.1f} Gbit/s ({hosts_name(rate.hosts, rate.per_host)})"
        for rate in figures.rates
        if (rate.method, rate.link) == (DDP, None)
    ]
    return f"Without a limit, DDP sends {', '.join(speeds)}." if speeds else ""


def _goals(rows: Sequence[Target]) -> str:
    """Say how many goals were reached, and which were not."""
    missed = [
        f"{row.what} is {row.measured:.3f}{row.unit}, "
        f"goal at {'least' if row.at_least else 'most'} {row.wanted:.2f}{row.unit}"
        for row in rows
        if row.reached is False
    ]
    counted = sum(row.reached is not None for row in rows)
    text = f"Of {counted} goals set before measuring, {counted - len(missed)} were reached."
    return f"{text} Not reached: {'; '.join(missed)}.\n" if missed else f"{text}\n"


def _wrapped(page: str) -> str:
    """Return the page with lines of prose and of lists that are not longer than in the others."""
    lines = []
    for line in page.split("\n"):
        if len(line) <= _WIDTH or line.startswith(("|", "    ", "<!--", "!", "#")):
            lines.append(line)
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(
                line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)


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
    rows = max(1, len(links))
    figure = Figure(figsize=(5, 1.2 + 1.7 * rows), dpi=120, layout="constrained")  # phones show it at about this width
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    drawn: dict[str, Any] = {}
    for axes, link in zip(panels, links, strict=False):
        for name, points in _lines(figures, hosts, link).items():
            color = "black" if name == CONTROL else f"C{list(METHODS).index(name)}"  # after ten, colors begin again
            style = ":" if name.startswith(DDP) else "-"
            (drawn[label_of(name)],) = axes.plot(
                *zip(*points, strict=True), color=color, linestyle=style, linewidth=1.4
            )
        axes.set(xscale="log")
        axes.set_title(f"{hosts} hosts, {link_name(link)}", fontsize=10)
        axes.xaxis.set_minor_formatter(NullFormatter())  # or the labels of short axes lie on each other
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("seconds of training (combined)")
    figure.supylabel("validation loss, nats per byte", fontsize=10)
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2, fontsize=9)
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
