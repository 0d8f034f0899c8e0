"""Cost of a Communicator as the ranks of one host become many: pycomm and Gloo in turns.

    python -m bench.collectives.scale [--ranks 2,4,8,16,32,64] [--sizes 1K,64K] [--rounds 9] [--json FILE]

All ranks are processes of this host, forked from one that has imported torch; with more of them than
cores they wait for one another's time slices, which is part of what is measured. Each has a
Communicator and a Gloo group for the sums, and makes others meanwhile:

creation: from a barrier until ``Communicator()`` or ``torch.distributed.new_group()`` returns, on the
slowest rank. sums of float32, in place, of an ordinary tensor: blocks of calls back to back, each
after a barrier; the figure of a block is its slowest rank's time over its calls. Sums are verified
before (all elements) and after every block (a sample). added per rank: descriptors, private memory
and proportional share of what is shared, by /proc/self/smaps_rollup, after one sum of each size; the
mean over the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass
from statistics import mean
from typing import Any

from bench.harness.arguments import counts, make_parser, size_text, sizes
from bench.harness.ranks import WorkerGroup, by_launcher
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, times
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_VARIANTS = ("pycomm", "Gloo")  # bench.collectives.scale_ranks imports torch, which the driver need not
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # every one of many ranks warns of addresses without names
_LAUNCHER = by_launcher("scale", [sys.executable, "-m", "bench.collectives.forked"])
_CALLS_OF_ALL = 320  # calls of a block times ranks
_MOST_CALLS = 40
_BLOCKS = 3


@dataclass(frozen=True)
class Measured:
    """Results with ``size`` ranks, by variant.

    Attributes:
        creation: seconds, of the slowest rank. calls: bytes of the array -> seconds per call.
        added: to every rank by one group: "descriptors", "pss" and "private" (bytes), means over the ranks.
    """

    size: int
    creation: dict[str, Samples]
    calls: dict[int, dict[str, Samples]]
    added: dict[str, dict[str, float]]


def main() -> None:
    arguments = _parse()
    print(headline())
    results: list[Measured] = []
    for size in arguments.ranks:
        measured = _measure(size, arguments)
        _print(measured, first=not results)
        results.append(measured)
    _print_added(results)
    settings = {"rounds": arguments.rounds, "blocks": _BLOCKS}
    write_json(arguments.json, "scale", settings, {"results": [_as_json(measured) for measured in results]})


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.collectives.scale", __doc__)
    parser.add_argument("--ranks", type=counts, default="2,4,8,16,32,64", help="numbers of ranks")
    parser.add_argument("--sizes", type=sizes, default="1K,64K", help="bytes, with K or M (default 1K,64K)")
    return parser.parse_args()


def _measure(size: int, arguments: argparse.Namespace) -> Measured:
    """Start the ranks, verify, and go through the rounds."""
    sizes = [num_bytes // 4 for num_bytes in arguments.sizes]
    creation: dict[str, list[float]] = {variant: [] for variant in _VARIANTS}
    taken: dict[int, dict[str, list[float]]] = {n: {variant: [] for variant in _VARIANTS} for n in arguments.sizes}
    with contextlib.ExitStack() as stack:
        setup = {"port": stack.enter_context(rendezvous()), "num_elements": max(sizes), "variants": _VARIANTS}
        ranks = stack.enter_context(
            WorkerGroup("scale", "bench.collectives.scale_ranks:ScaleRank", size, setup, _QUIET, _LAUNCHER)
        )
        for variant in _VARIANTS:
            ranks.call("open", variant, sizes)  # the first one also takes what stays: code, pages of the heap
        added = {variant: _mean(ranks.call("open", variant, sizes)) for variant in _VARIANTS}
        for number in range(arguments.rounds):
            # Forwards and backwards in turns, so that nobody always follows the other.
            for variant in _VARIANTS if number % 2 == 0 else reversed(_VARIANTS):
                creation[variant].append(max(ranks.call("turn_create", variant)))
                for num_bytes, row in taken.items():
                    by_rank = ranks.call("turn", variant, num_bytes // 4, _calls(size), _BLOCKS)
                    row[variant] += [max(block) for block in zip(*by_rank, strict=True)]
    return Measured(
        size,
        {variant: Samples.of(seconds) for variant, seconds in creation.items()},
        {n: {variant: Samples.of(seconds) for variant, seconds in row.items()} for n, row in taken.items()},
        added,
    )


def _calls(size: int) -> int:
    return max(4, min(_MOST_CALLS, _CALLS_OF_ALL // size))


def _mean(by_rank: list[dict[str, int]]) -> dict[str, float]:
    return {name: mean(found[name] for found in by_rank) for name in by_rank[0]}


def _print(measured: Measured, first: bool) -> None:
    if first:
        print("\nall_reduce of float32, verified; median (p10 - p90)")
    rows = [["creation", *_cells(measured.creation)]]
    rows += [
        [f"{size_text(num_bytes)}, blocks of {_calls(measured.size)}", *_cells(row)]
        for num_bytes, row in measured.calls.items()
    ]
    print()
    print_table([f"{measured.size} ranks", "pycomm", "", "Gloo", "", "vs Gloo"], rows)


def _cells(row: dict[str, Samples]) -> list[str]:
    ours, peer = (row[variant] for variant in _VARIANTS)
    return [*ours.cells(), *peer.cells(), times(peer.median / ours.median)]


def _print_added(results: list[Measured]) -> None:
    print("\nadded to every rank by one group, after a sum of each size")
    header = ["ranks", *(f"{variant}, {what}" for variant in _VARIANTS for what in ("descriptors", "private", "Pss"))]
    rows = []
    for measured in results:
        cells = [str(measured.size)]
        for variant in _VARIANTS:
            found = measured.added[variant]
            cells += [f"{found['descriptors']:.0f}", *(f"{found[name] / 1e6:.2f} MB" for name in ("private", "pss"))]
        rows.append(cells)
    print_table(header, rows)


def _as_json(measured: Measured) -> dict[str, Any]:
    return {
        "ranks": measured.size,
        "creation": {variant: samples.as_json() for variant, samples in measured.creation.items()},
        "all_reduce": [
            {
                "bytes": num_bytes,
                "calls_per_block": _calls(measured.size),
                "seconds_per_call": {variant: samples.as_json() for variant, samples in row.items()},
            }
            for num_bytes, row in measured.calls.items()
        ],
        "added_per_rank": measured.added,
    }


if __name__ == "__main__":
    main()
