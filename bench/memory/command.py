"""Peak memory of a rank that trains, in multiples of its parameters, by method.

    python -m bench.memory [--ranks 2] [--layers 24] [--width 2048] [--only TEXT] [--json FILE]

A model of square layers without biases, and SGD without momentum, so that the least is 2: parameters and gradients. A
thread of each rank reads the proportional set size (Pss, where shared pages count in part) every 2 ms of the first six
steps, and subtracts what the process had before the model. "peak" is the largest rank's, with glibc's default settings,
so memory that the allocator keeps counts. "live" is the same where the allocator returns whatever is freed: the memory
in use at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.harness.arguments import plain_parser, positive
from bench.harness.ranks import WorkerGroup
from bench.harness.results import headline, write_json
from bench.memory.ranks import WAYS
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}


def main() -> None:
    arguments = _parse()
    num_bytes = 4 * arguments.layers * arguments.width**2
    print(f"{headline()}\n{num_bytes / (1 << 20):.0f} MiB of parameters, {arguments.ranks} ranks of this host")
    rows, figures = [], []
    for way in (way for way in WAYS if arguments.only in way):
        peak, live = (_peak(way, arguments, environment) / num_bytes for environment in ({}, _GIVE_BACK))
        rows.append([way, f"{peak:.2f}", f"{live:.2f}"])
        figures.append({"way": way, "peak": peak, "live": live})
    print_table(["multiples of the parameters", "peak", "live"], rows)
    settings = {name: getattr(arguments, name) for name in ("ranks", "layers", "width")}
    write_json(arguments.json, "memory", settings, {"rows": figures})


def _parse() -> argparse.Namespace:
    parser = plain_parser("bench.memory", __doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--ranks", type=positive, default=2, help="(default 2)")
    parser.add_argument("--layers", type=positive, default=24, help="(default 24)")
    parser.add_argument("--width", type=positive, default=2048, help="rows and columns of a layer (default 2048)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only ways with this in their name")
    return parser.parse_args()


def _peak(way: str, arguments: argparse.Namespace, environment: dict[str, str]) -> float:
    """Return the bytes of the largest rank."""
    with rendezvous() as port:
        setup = {"port": port, "way": way, "layers": arguments.layers, "width": arguments.width}
        worker = "bench.memory.ranks:MemoryRank"
        with WorkerGroup("memory", worker, arguments.ranks, setup, environment=environment) as ranks:
            return float(max(ranks.call("peak")))
