"""Judge of "auto": calibrate the running group, calibrate it again, and hold the first choices against the second.

    torchrun --standalone --nproc-per-node 4 -m bench.collectives.choices [--transport shared_memory] [--json FILE]

For sizes from 1 KB to 64 MB: what ``schedule.choose`` takes after the first calibration, and how much longer
that took in the second one than the fastest did there.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from bench.harness.arguments import make_parser
from bench.harness.results import headline, write_json
from bench.harness.timing import duration, times
from pycomm import Communicator, schedule
from pycomm.tools.cli.table import print_table
from pycomm.training.cost.calibration import calibrate

_SIZES = tuple(4**i for i in range(5, 14))


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with Communicator(transport=arguments.transport) as communicator:
        first, second = (calibrate(communicator, _SIZES) for _ in range(2))
        if communicator.rank == 0:
            print(headline())
            print(f"\nall_reduce among {communicator.size} ranks, {communicator.transport}\n")
            rows = [_judge(size, first, second) for size in _SIZES]
            _print(rows)
            write_json(arguments.json, "choices", {"ranks": communicator.size}, {"choices": rows})
    dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.collectives.choices", __doc__)
    parser.add_argument("--transport", choices=("auto", "shared_memory", "torch"), default="auto")
    return parser.parse_args()


def _judge(size: int, first: schedule.Network, second: schedule.Network) -> dict[str, Any]:
    # What "auto" takes, not what was fastest in the first by a hair.
    crossovers = schedule.rank_algorithms(first.measured_ranks, first).crossovers()
    chosen = [name for begin, name in crossovers if begin <= size][-1]
    seconds = {name: dict(curve)[float(size)] for name, curve in second.measured.items()}
    best = min(seconds, key=lambda name: seconds[name])
    taken = seconds.get(chosen, float("nan"))  # the second may not have looked at it
    return {"bytes": size, "chosen": chosen, "seconds": taken, "best": best, "best_seconds": seconds[best]}


def _print(rows: list[dict[str, Any]]) -> None:
    table = [
        [
            f"{row['bytes'] / 1024:g} KB",
            row["chosen"],
            duration(row["seconds"]),
            row["best"],
            duration(row["best_seconds"]),
            times(row["seconds"] / row["best_seconds"]),
        ]
        for row in rows
    ]
    print_table(["", "chosen", "took", "fastest", "took", "chosen / fastest"], table)


if __name__ == "__main__":
    main()
