"""Cost of agreeing by name: small all-reduces of pycomm.horovod beside the same ones in an order that is agreed.

    python -m bench.horovod [--ranks 2] [--sizes 4,4K,64K] [--rounds 9] [--count 300] [--json FILE]

Sums of float32 in place, one thread per rank: by ``Communicator.all_reduce``, which ranks call in the same order; by
``hvd.allreduce_`` with one name, with a name that is new every time, and without a name; by ``allreduce_async_`` and
``synchronize``; and 20 names at once, in another order on every rank. All live in the same processes and have turns; a
figure is of one operation, on the slowest rank. Every way must have the right sum before anything is timed.
"""

from __future__ import annotations

import argparse

from bench.harness.arguments import make_parser, positive, size_text, sizes
from bench.harness.ranks import KEEP_MEMORY, WorkerGroup
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, duration, times
from bench.horovod.ranks import AGREED, WAYS
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

Found = dict[int, dict[str, Samples]]


def main() -> None:
    arguments = _parse()
    print(headline())
    found = _measure(arguments)
    for num_bytes, samples in found.items():
        _print(num_bytes, samples, arguments.ranks)
    settings = {name: getattr(arguments, name) for name in ("ranks", "rounds", "count", "sizes")}
    results = {str(num_bytes): {way: each.as_json() for way, each in by.items()} for num_bytes, by in found.items()}
    write_json(arguments.json, "horovod", settings, results)


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.horovod", __doc__)
    parser.add_argument("--ranks", type=positive, default=2, help="(default 2)")
    parser.add_argument("--sizes", type=sizes, default="4,4K,64K", help="bytes of a tensor (default 4,4K,64K)")
    parser.add_argument("--count", type=positive, default=300, help="operations per turn (default 300)")
    return parser.parse_args()


def _measure(arguments: argparse.Namespace) -> Found:
    taken: dict[int, dict[str, list[float]]] = {n: {way: [] for way in WAYS} for n in arguments.sizes}
    with (
        rendezvous() as port,
        WorkerGroup(
            *("horovod", "bench.horovod.ranks:HorovodRank", arguments.ranks, {"port": port}),
            environment=KEEP_MEMORY,
        ) as ranks,
    ):
        for num_bytes, by_way in taken.items():
            ranks.call("verify", num_bytes)
            for number in range(arguments.rounds):
                for way in WAYS if number % 2 == 0 else reversed(WAYS):
                    by_way[way].append(max(ranks.call("turn", way, num_bytes, arguments.count)))
    return {n: {way: Samples.of(seconds) for way, seconds in by_way.items()} for n, by_way in taken.items()}


def _print(num_bytes: int, found: dict[str, Samples], ranks: int) -> None:
    print(f"\nall-reduce of {size_text(num_bytes)}, {ranks} ranks, one operation")
    base = found[AGREED].median
    rows = [
        [way, *samples.cells(), "" if way == AGREED else duration(samples.median - base), times(samples.median / base)]
        for way, samples in found.items()
    ]
    print_table(["", "median", "p10 - p90", "for agreeing", f"vs {AGREED}"], rows)
