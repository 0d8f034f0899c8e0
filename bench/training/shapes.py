"""Step times of other models than the usual one: of many small parameters, and of large ones by compression method."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import median

from bench.harness.ranks import KEEP_MEMORY, WorkerGroup
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, duration
from bench.training.ranks import DDP, DENSE, METHODS, NONE
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_SMALL = {160: [16] * 81, 1000: [32] * 501, 5000: [32] * 2501}
"""Widths of models by their number of parameters, biases included."""
_LARGE = [2048] * 13
_AT_ONCE = 3
"""Number of methods side by side: each has 200 MB of parameters, gradients and state on each rank."""
_BATCH = 16


def measure_small(arguments: argparse.Namespace) -> None:
    """Print step times with many small parameters."""
    print(f"{headline()}\n{arguments.ranks} ranks, {arguments.rounds} rounds, batch {_BATCH} per rank")
    rows, figures = [], []
    for number, widths in _SMALL.items():
        steps = max(4, 4000 // number)
        found = _steps(widths, (NONE, DDP, DENSE), steps, arguments)
        none, ddp, ours = (median(found[way]) for way in (NONE, DDP, DENSE))
        rows.append([f"{number:,}", duration(none), duration(ddp), duration(ours), f"{ours / ddp:.2f}"])
        times = {way: Samples.of(seconds).as_json() for way, seconds in found.items()}
        figures.append({"parameters": number, "seconds": times, "ratio": ours / ddp})
    print_table(["parameters", NONE, DDP, DENSE, "pycomm / DDP"], rows)
    write_json(arguments.json, "training_small", _settings(arguments), {"rows": figures})


def measure_methods(arguments: argparse.Namespace) -> None:
    """Print step times with each method of compression."""
    layers = len(_LARGE) - 1
    print(f"{headline()}\n{layers} layers of {_LARGE[0]} x {_LARGE[1]}, {arguments.ranks} ranks, batch {_BATCH}")
    rows, figures = [], []
    for ways in (NONE, DDP), *_groups(list(METHODS)):
        found = _steps(_LARGE, (DENSE, *ways), 4, arguments)
        dense = median(found[DENSE])
        for way in ways:
            step = Samples.of(found[way])
            rows.append([way, *step.cells(), duration(dense), f"{step.median / dense:.2f}"])
            figures.append({"way": way, "seconds": step.as_json(), "dense_seconds": dense})
    print_table(["", "step", "p10 - p90", "dense beside it", "x dense"], rows)
    write_json(arguments.json, "training_methods", _settings(arguments), {"rows": figures})


def _groups(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for begin in range(0, len(names), _AT_ONCE):
        yield tuple(names[begin : begin + _AT_ONCE])


def _settings(arguments: argparse.Namespace) -> dict[str, int]:
    return {"ranks": arguments.ranks, "rounds": arguments.rounds, "batch": _BATCH}


def _steps(
    widths: Sequence[int], ways: Sequence[str], steps: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of each step on its slowest rank, by way."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    worker = "bench.training.ranks:StepRank"
    with rendezvous() as port:
        setup = {"port": port, "widths": list(widths), "batch": _BATCH, "ways": list(ways)}
        with WorkerGroup("training", worker, arguments.ranks, setup, environment=KEEP_MEMORY) as ranks:
            for number in range(arguments.rounds + 1):  # of which the first makes the buckets
                for way in ways if number % 2 == 0 else reversed(ways):
                    by_rank = ranks.call("turn", way, steps)
                    if number > 0:
                        found[way] += [max(step) for step in zip(*(turn["seconds"] for turn in by_rank), strict=True)]
            ranks.call("check_replicas")
    return found
