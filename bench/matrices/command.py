"""Cost of Muon on several ranks: iterations of a byte-level GPT, and the optimizer's step in them.

    python -m bench.matrices [--ranks 1,2,4] [--width 320] [--layers 8] [--batch 2] [--rounds 9] [--json FILE]

One thread per rank. All ways live in the same processes and have turns. Each steps hidden matrices by torch's Muon, and
the rest by AdamW: under ``attach``, and under DistributedDataParallel over Gloo, both whole on each rank; with
``shard="optimizer"``; and under DistributedDataParallel with the matrices dealt to the ranks, which send them to one
another by an all-gather after the step. Each figure is the slowest rank's. Where there are fewer cores than ranks,
processor seconds of a rank's step say more than its time. "state" is the optimizers' state, on the rank that has most.

After four steps from equal parameters all ways must have the same ones, up to the rounding of bfloat16, on all ranks,
before anything is timed.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.harness.arguments import counts, make_parser, positive
from bench.harness.ranks import KEEP_MEMORY, WorkerGroup
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples
from bench.matrices.ranks import WAYS
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_FIGURES = ("whole", "step", "cpu")


def main() -> None:
    parser = make_parser("bench.matrices", __doc__)
    parser.add_argument("--ranks", type=counts, default=[1, 2, 4], help="(default 1,2,4)")
    parser.add_argument("--width", type=positive, default=320, help="of the model (default 320)")
    parser.add_argument("--layers", type=positive, default=8, help="of the model (default 8)")
    parser.add_argument("--batch", type=positive, default=2, help="windows of 64 bytes per rank (default 2)")
    arguments = parser.parse_args()
    print(headline(), flush=True)
    found = {str(ranks): _measure(arguments, ranks) for ranks in arguments.ranks}
    settings = {name: getattr(arguments, name) for name in ("ranks", "width", "layers", "batch", "rounds")}
    write_json(arguments.json, "matrices", settings, {"by_ranks": found})


def _measure(arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    taken: dict[str, dict[str, list[float]]] = {way: {name: [] for name in _FIGURES} for way in WAYS}
    setup: dict[str, Any] = {name: getattr(arguments, name) for name in ("width", "layers", "batch")}
    with (
        rendezvous() as port,
        WorkerGroup(
            *("matrices", "bench.matrices.ranks:MatricesRank", ranks, {"port": port, **setup}),
            environment=KEEP_MEMORY,
        ) as group,
    ):
        group.call("verify")
        for number in range(arguments.rounds):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                for of_ranks in zip(*group.call("turn", way, 1), strict=True):
                    for name in _FIGURES:
                        taken[way][name].append(max(each[name] for each in of_ranks))
        states = group.call("state_bytes")
    found: dict[str, Any] = {
        way: {name: Samples.of(seconds).as_json() for name, seconds in each.items()} for way, each in taken.items()
    }
    for way in WAYS:
        found[way]["state_bytes"] = max(each[way] for each in states)
    _print(found, ranks)
    return found


def _print(found: dict[str, Any], ranks: int) -> None:
    print(f"\nverified: {ranks} ranks, one thread each", flush=True)
    rows = [
        [way, *(f"{1e3 * each[name]['median']:.0f} ms" for name in _FIGURES), f"{each['state_bytes'] / 1e6:.1f} MB"]
        for way, each in found.items()
    ]
    print_table(["way", "iteration", "step", "step, processor", "state"], rows)
