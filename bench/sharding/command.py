"""Cost of an optimizer phase: from each rank's gradients, as backward leaves them, to the new parameters of all ranks.

    python -m bench.sharding [--ranks 2] [--millions 25.6] [--rounds 9] [--count 3] [--json FILE]

Adam, float32, one thread per rank: all ranks reduce everything and step by pycomm's fused kernel; the ranks reduce
and step a part each, and write it to all (``attach(shard=...)``); torch's ZeroRedundancyOptimizer over Gloo, with
torch's fused Adam, from gradients that are in buckets already. All ways live in the same processes and have turns. A
phase's figure is its slowest rank's. "bytes" is what moves per parameter and host, "GB/s" that over the time.

After one step from equal gradients all ways must have the same parameters, pycomm's to the bit, before anything is
timed.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.harness.arguments import make_parser, positive
from bench.harness.busy import add_arguments, busy
from bench.harness.ranks import KEEP_MEMORY, WorkerGroup
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, times
from bench.sharding.ranks import FULL, OPTIMIZER, WAYS, WHOLE
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous


def main() -> None:
    arguments = _parse()
    print(headline())
    with busy(arguments.busy, arguments.nice):
        found = _measure(arguments)
    _print(found, arguments)
    settings = {name: getattr(arguments, name) for name in ("ranks", "rounds", "count", "millions", "busy", "nice")}
    write_json(arguments.json, "sharding", settings, {way: samples.as_json() for way, samples in found.items()})


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.sharding", __doc__)
    parser.add_argument("--ranks", type=positive, default=2, help="(default 2)")
    parser.add_argument("--millions", type=float, default=25.6, help="of parameters (default 25.6, as ResNet-50 has)")
    parser.add_argument("--count", type=positive, default=3, help="phases per turn (default 3)")
    add_arguments(parser)
    return parser.parse_args()


def _measure(arguments: argparse.Namespace) -> dict[str, Samples]:
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    setup: dict[str, Any] = {"millions": arguments.millions}
    with (
        rendezvous() as port,
        WorkerGroup(
            *("sharding", "bench.sharding.ranks:ShardingRank", arguments.ranks, {"port": port, **setup}),
            environment=KEEP_MEMORY,
        ) as ranks,
    ):
        ranks.call("verify")
        for number in range(arguments.rounds):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                by_rank = ranks.call("turn", way, arguments.count)
                taken[way] += [max(seconds) for seconds in zip(*by_rank, strict=True)]
    return {way: Samples.of(seconds) for way, seconds in taken.items()}


def _bytes_moved(way: str, ranks: int) -> int | None:
    """Return the bytes per parameter and host that a phase moves at least, Adam in float32; ``None``: not counted."""
    moved = {
        WHOLE: 44 * ranks - 8,
        OPTIMIZER: 16 * ranks + 20,
        FULL: 20 * ranks + 16,
    }
    return moved.get(way)


def _print(found: dict[str, Samples], arguments: argparse.Namespace) -> None:
    print(f"\noptimizer phase of {arguments.millions} million parameters, {arguments.ranks} ranks")
    rows = []
    for way, samples in found.items():
        moved = _bytes_moved(way, arguments.ranks)
        rate = "-" if moved is None else f"{moved * arguments.millions / 1e3 / samples.median:.1f}"
        ratio = times(found[WHOLE].median / samples.median)
        rows.append([way, *samples.cells(), ratio, "-" if moved is None else str(moved), rate])
    print_table(["", "seconds", "p10 - p90", f"vs {WHOLE}", "bytes", "GB/s"], rows)
