"""Pipelines on real ranks beside their simulation, and what it costs to prove them.

    python -m bench.pipelines [--ranks 4] [--microbatches 8] [--rounds 5] [--json FILE]

(a) Step time of every schedule on processes over the backend "pycomm", run by torch's runtime. Stages sleep instead
of computing, so that cores, of which there may be fewer than ranks, are no resource; what is compared is order and
communication. "bubble" is the part of the ranks' time in which they had no work, measured (from the step's time) and
simulated (from the table, without communication). Gradients are verified first.
(b) Seconds to generate, verify and simulate large tables, in this process alone.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from typing import Any

from bench.harness.arguments import make_parser, positive
from bench.harness.ranks import WorkerGroup
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, duration
from pycomm.schedule import pipeline as tables
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_LARGE = (64, 512)
"""WorkerGroup and microbatches of (b)."""


def main() -> None:
    arguments = _parse()
    print(headline())
    seconds = dict.fromkeys(("forward", "backward", "weights"), arguments.milliseconds / 1e3)
    steps = _measure_steps(arguments, seconds)
    large = _measure_large()
    settings = {name: getattr(arguments, name) for name in ("ranks", "microbatches", "rounds", "milliseconds")}
    write_json(arguments.json, "pipelines", settings, {"steps": steps, "large": large})


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.pipelines", __doc__)
    parser.add_argument("--ranks", type=positive, default=4, help="of the pipelines in (a) (default 4)")
    parser.add_argument("--microbatches", type=positive, default=8, help="in a step of (a) (default 8)")
    parser.add_argument(
        "--milliseconds",
        type=positive,
        default=10,
        help="of a forward, an input's and a weights' gradient (default 40)",
    )
    return parser.parse_args()


def _simulated(name: str, arguments: argparse.Namespace, seconds: dict[str, float]) -> tuple[float, float]:
    """Return the seconds of a step, and the seconds of its work on one rank."""
    table = tables.by_name(name, arguments.ranks, arguments.microbatches)
    both = seconds["backward"] + seconds["weights"]
    work = (seconds["forward"] + both) * arguments.microbatches * table.num_stages / arguments.ranks
    backward = seconds["backward"] if table.splits_weights else both
    run = tables.simulate(table, forward=seconds["forward"], backward=backward, weights=seconds["weights"])
    return run.seconds, work


def _measure_steps(arguments: argparse.Namespace, seconds: dict[str, float]) -> list[dict[str, Any]]:
    names = tables.names()
    taken: dict[str, list[float]] = {name: [] for name in names}
    setup = {"seconds": seconds, "width": 64, "microbatches": arguments.microbatches}
    with (
        rendezvous() as port,
        WorkerGroup(
            "pipelines", "bench.pipelines.ranks:PipelineRank", arguments.ranks, {"port": port, **setup}
        ) as ranks,
    ):
        for name in names:
            ranks.call("make", name)
        for _ in range(arguments.rounds):
            for name in names:
                taken[name].append(max(ranks.call("turn", name)))
    print(f"\n(a) a step of {arguments.microbatches} microbatches on {arguments.ranks} ranks; gradients verified")
    rows, figures = [], []
    for name in names:
        step, (simulated, work) = Samples.of(taken[name]), _simulated(name, arguments, seconds)
        bubbles = [1 - work / step.median, 1 - work / simulated]
        ratio = f"{step.median / simulated:.3f}"
        rows.append([name, *step.cells(), duration(simulated), ratio, *(f"{100 * bubble:.1f} %" for bubble in bubbles)])
        figures.append({"schedule": name, "seconds": step.as_json(), "simulated": simulated, "work": work})
    print_table(["", "step", "p10 - p90", "simulated", "ratio", "bubble", "simulated"], rows)
    return figures


def _measure_large() -> list[dict[str, Any]]:
    ranks, microbatches = _LARGE
    print(f"\n(b) tables of {ranks} ranks and {microbatches} microbatches")
    rows, figures = [], []
    for name in tables.names():
        marks = [time.perf_counter()]
        table = tables.by_name(name, ranks, microbatches)
        marks.append(time.perf_counter())
        tables.verify(table)
        marks.append(time.perf_counter())
        tables.simulate(table, forward=1.0, backward=1.0, weights=1.0)
        marks.append(time.perf_counter())
        spent = [after - before for before, after in pairwise(marks)]
        rows.append([name, f"{len(table.rank):,}", *(f"{each:.2f} s" for each in spent)])
        made = dict(zip(("generate", "verify", "simulate"), spent, strict=True))
        figures.append({"schedule": name, "actions": len(table.rank), **made})
    print_table(["", "actions", "generate", "verify", "simulate"], rows)
    return figures
