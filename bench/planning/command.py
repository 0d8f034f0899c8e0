"""Predicted against measured: steps of small models on this host, their time and their memory.

    python -m bench.planning [--rounds 5] [--steps 4] [--json FILE]

The network is calibrated, and every layer is timed on all ranks at once, between the turns of the layouts that are
measured. From these the planner predicts each layout as `pycomm plan model` would, with the cores of this host as
a resource. Time is the median of the slowest rank's steps. Memory is what a rank's processes really have in pages of
their own and in shared files, at the most of the moments between layers, beyond the same with a tiny model.
"""

from __future__ import annotations

import argparse
import os
from statistics import median
from typing import Any

import torch

from bench.harness.arguments import make_parser, positive
from bench.harness.ranks import KEEP_MEMORY, WorkerGroup
from bench.harness.results import headline, write_json
from bench.planning.models import CASES, Case
from pycomm.descriptions import size_text
from pycomm.parallel.auto import styles_of
from pycomm.parallel.planning import Candidate, Device, Price, Pricer, Profile, Task, profile, with_seconds
from pycomm.parallel.planning.price import Rows
from pycomm.schedule import Network
from pycomm.tools.cli.plan.report import time_text
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_LAYOUTS = {
    2: (Candidate(1, 1, 2), Candidate(1, 2, 1), Candidate(2, 1, 1, microbatches=4)),
    4: (Candidate(1, 1, 4), Candidate(1, 2, 2), Candidate(4, 1, 1, microbatches=8)),
}
_GIVE_MEMORY_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


def main() -> None:
    arguments = _parse()
    cores = len(os.sched_getaffinity(0))
    print(f"{headline()}\n{cores} cores, one thread per rank")
    rows, figures = [], []
    for name in arguments.models:
        for size in arguments.ranks:
            for found in _compare(name, size, cores, arguments):
                figures.append(found)
                rows.append(_row(found))
    header = ["model, ranks, layout", "predicted", "measured", "ratio", "predicted", "measured", "ratio"]
    print()
    print_table(header, rows)
    for what in ("seconds", "bytes"):
        worst = max(abs(each[f"predicted_{what}"] / each[f"measured_{what}"] - 1) for each in figures)
        print(f"{what}: predictions are off by at most {100 * worst:.0f} %")
    settings = {"rounds": arguments.rounds, "steps": arguments.steps, "cores": cores}
    write_json(arguments.json, "planning", settings, {"layouts": figures})


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.planning", __doc__)
    parser.set_defaults(rounds=5)
    parser.add_argument("--steps", type=positive, default=4, help="steps per turn (default 4)")
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, choices=list(_LAYOUTS), default=list(_LAYOUTS))
    return parser.parse_args()


def _compare(name: str, size: int, cores: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the layouts of ``size`` ranks, predict them, and return both."""
    case = CASES[name]
    plain = _profile(case, {})
    names = [layer.name for layer in plain.layers[0]]
    divided = _profile(case, styles_of(case.make(False), 2))
    layouts = {candidate.name: candidate for candidate in _LAYOUTS[size]}
    seconds: dict[str, list[float]] = {key: [] for key in layouts}
    layers: dict[str, list[Any]] = {key: [] for key in layouts}
    speeds: list[float] = []
    with rendezvous() as port, WorkerGroup("planning", "bench.planning.ranks:PlanRank", size, {"port": port},
                                     environment=KEEP_MEMORY) as ranks:  # fmt: skip
        network = Network.from_json(ranks.call("calibrate")[0])
        described = {key: _described(candidate, divided, plain) for key, candidate in layouts.items()}
        for key in layouts:
            ranks.call("prepare", key, name, described[key])
        for _ in range(arguments.rounds):
            speeds.append(min(ranks.call("update", name)))
            for key, candidate in layouts.items():
                samples = case.samples // candidate.dp // candidate.microbatches
                layers[key].append(_slowest(ranks.call("layers", name, names, samples)))
                by_rank = ranks.call("turn", key, arguments.steps)
                seconds[key] += [max(step) for step in zip(*by_rank, strict=True)]
        for key in layouts:
            ranks.call("drop", key)
    task = Task(devices=size, memory=1e12, batch=case.samples, device=Device(1.0, median(speeds)), network=network,
                optimizer="adamw", cores=cores)  # fmt: skip
    found = []
    for key, candidate in layouts.items():
        timed = _timed(divided if candidate.tp > 1 else plain, case, candidate, layers[key], size, cores)
        price = _price(task, candidate, timed, described[key]["stages"])
        found.append(
            {
                "model": name,
                "ranks": size,
                "layout": key,
                "predicted_seconds": price.times.total,
                "measured_seconds": median(seconds[key]),
                "predicted_bytes": price.largest,
                "measured_bytes": _memory(name, size, described[key]),
                "parts": vars(price.times),
                "samples": seconds[key],
            }
        )
    return found


def _profile(case: Case, split: dict[str, str]) -> Profile:
    def loss(output: torch.Tensor) -> torch.Tensor:
        return case.loss(output, case.target(len(output), False))

    return profile(lambda: case.make(False), lambda count: case.batch(count, False), loss, split)


def _described(candidate: Candidate, divided: Profile, plain: Profile) -> dict[str, Any]:
    """Return a layout as the ranks take it; stages are cut by FLOPs."""
    task = Task(devices=candidate.pp, memory=1e12, batch=candidate.microbatches, device=Device(1e9))
    price = _price(task, Candidate(candidate.pp, 1, 1, candidate.microbatches), plain)
    stages = [[name for layer in stage for name in layer.modules] for stage in price.stages]
    mesh = candidate.sizes
    return {"mesh": mesh, "split": divided.split, "stages": stages, "microbatches": candidate.microbatches}


def _slowest(by_rank: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the medians over the ranks of each layer's seconds."""
    return [
        (median(times[0] for times in layer), median(times[1] for times in layer))
        for layer in zip(*by_rank, strict=True)
    ]


def _timed(made: Profile, case: Case, candidate: Candidate, rounds: list[Any], size: int, cores: int) -> Profile:
    """Return the profile with measured seconds, as they are while no more ranks compute than there are cores."""
    crowd = max(1.0, size / cores)
    taken = [
        (median(layer[0] for layer in each) / crowd, median(layer[1] for layer in each) / crowd)
        for each in zip(*rounds, strict=True)
    ]
    return with_seconds(made, case.samples // candidate.dp // candidate.microbatches, taken)


def _price(task: Task, candidate: Candidate, made: Profile, stages: list[list[str]] | None = None) -> Price:
    """Return the price, of these stages if any are given."""
    pricer = Pricer(task)
    layers = made.at(task.batch // candidate.dp // candidate.microbatches)
    rows = Rows(layers, candidate.tp, task.device, made.measured, pricer.links)
    if stages is not None:
        names = [layer.name for layer in layers]
        return pricer.of_stages(candidate, rows, [names.index(stage[0]) for stage in stages])
    price = pricer.price(candidate, rows)
    assert isinstance(price, Price), "there is room"
    return price


def _memory(name: str, size: int, layout: dict[str, Any]) -> int:
    """Return the most that a rank takes, measured by ranks that have done nothing else."""
    with rendezvous() as port, WorkerGroup("planning", "bench.planning.ranks:PlanRank", size, {"port": port},
                                     environment=_GIVE_MEMORY_BACK) as ranks:  # fmt: skip
        return int(max(ranks.call("memory", name, layout)))


def _row(found: dict[str, Any]) -> list[str]:
    cells = [f"{found['model']}, {found['ranks']}, {found['layout']}"]
    for what, text in (("seconds", time_text), ("bytes", size_text)):
        predicted, measured = found[f"predicted_{what}"], found[f"measured_{what}"]
        cells += [text(predicted), text(measured), f"{predicted / measured:.2f}"]
    return cells
