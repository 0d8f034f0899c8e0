"""What attach and a step cost as work grows, the exponents of that, and the laws they should follow.

    python -m bench.growth [--ranks 2,4,8,16,32,64] [--parameters 10,100,1000,10000] [--bytes 1K,32K,1M,32M,1G]
                           [--buckets 1,4,16,64] [--simulated 16,64,256,1024,4096] [--dtype float32] [--json FILE]

All ranks are processes of this host, forked from one that has imported torch. One number grows, the others stay: two
ranks, except where ranks grow, which have 100 parameters and 1 MB in 4 buckets. 4 MB are divided among more and more
parameters; 8 parameters become larger; 16 MB of 64 parameters go into more buckets. --dtype float16 --bytes 5G
has more than 2^31 elements together (a rank needs three times the bytes).

attach: seconds on the slowest rank, without what the first attach of a process imports. Everything else is of one rank,
the mean over the ranks. host: processor time of the training thread in a step; alone: the same before attach. messages,
sent: operations of the transport in a step, and bytes of gradients and flags. requests: to the store, in one attach,
without repeated ones, of the rank that had to wait least. descriptors, private, shared: what an attach adds; shared is
all that the rank's own shared files have allocated, private everything else. left: descriptors that are still open
after detach. Averages are verified in every round.

exponent: see bench.growth.laws. --simulated: all-reduce of 100 MB on a described network, by pycomm.schedule: these
figures are not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from bench.growth.laws import LAWS, SIMULATED, Law, expected, exponent
from bench.harness.arguments import counts, make_parser, positive, size_text, sizes
from bench.harness.ranks import WorkerGroup, by_launcher
from bench.harness.results import headline, write_json
from bench.harness.timing import duration
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

Curve = dict[str, list[float]]
"""Values of each cost at the points of one axis."""

_MODELS = {
    "ranks": {"parameters": 100, "num_bytes": 1 << 20, "buckets": 4},
    "parameters": {"num_bytes": 4 << 20, "buckets": 4},
    "bytes": {"parameters": 8, "buckets": 4},
    "buckets": {"parameters": 64, "num_bytes": 16 << 20},
}
"""What stays the same while an axis grows."""
_ARGUMENTS = {"parameters": "parameters", "bytes": "num_bytes", "buckets": "buckets"}
_SECONDS = ("attach", "host", "alone", "seconds")
_BYTES = ("private", "shared", "sent")
_NETWORK, _SIMULATED_BYTES = "ethernet-10g", 100e6
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # every one of many ranks warns of addresses without names
_LAUNCHER = by_launcher("growth", [sys.executable, "-m", "bench.collectives.forked"])


def main() -> None:
    """Run the bench."""
    arguments = _parse()
    print(headline())
    points = {axis: getattr(arguments, axis) for axis in LAWS}
    curves = measured(points, arguments.rounds, arguments.steps, arguments.dtype)
    results = {axis: _shown(axis, points[axis], curve, LAWS[axis]) for axis, curve in curves.items()}
    simulated = {}
    for name, laws in SIMULATED.items():
        if arguments.simulated:
            simulated[name] = _shown(f"{name}, simulated", arguments.simulated, _simulate(name, arguments), laws)
    settings = {name: getattr(arguments, name) for name in ("rounds", "steps", "dtype", *LAWS, "simulated")}
    write_json(arguments.json, "growth", settings, {"measured": results, "simulated": simulated})


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.growth", __doc__)
    parser.set_defaults(rounds=3)
    parser.add_argument("--steps", type=positive, default=5, help="timed steps of each round (default 5)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of parameters")
    for axis, default in (("ranks", "2,4,8,16,32,64"), ("parameters", "10,100,1000,10000"), ("buckets", "1,4,16,64")):
        parser.add_argument(f"--{axis}", type=_some, default=default, help=f"rising numbers; default {default}, or 0")
    parser.add_argument("--bytes", type=_some_sizes, default="1K,32K,1M,32M,1G", help="with K, M or G; or 0")
    parser.add_argument("--simulated", type=_some, default="16,64,256,1024,4096", help="numbers of ranks, or 0")
    return parser.parse_args()


def _some(text: str) -> list[int]:
    return [] if text == "0" else sorted(counts(text))


def _some_sizes(text: str) -> list[int]:
    return [] if text == "0" else sizes(text)


def measured(points: Mapping[str, Sequence[int]], rounds: int, steps: int, dtype: str = "float32") -> dict[str, Curve]:
    """Return the costs at the ``points`` of each axis: the mean over the ranks, but for attach, the slowest, and for
    requests, the fewest.
    """
    found = {}
    if points.get("ranks"):
        model = _MODELS["ranks"]
        found["ranks"] = _joined([_measure(size, [model], rounds, steps, dtype)[0] for size in points["ranks"]])
    axes = [axis for axis in _ARGUMENTS if points.get(axis)]
    models = [{**_MODELS[axis], _ARGUMENTS[axis]: point} for axis in axes for point in points[axis]]
    rows = iter(_measure(2, models, rounds, steps, dtype) if models else [])
    return found | {axis: _joined([next(rows) for _ in points[axis]]) for axis in axes}


def _measure(
    size: int, models: Sequence[Mapping[str, int]], rounds: int, steps: int, dtype: str
) -> list[dict[str, float]]:
    """Return the costs of each model among ``size`` ranks."""
    found = []
    with (
        rendezvous() as port,
        WorkerGroup("growth", "bench.growth.ranks:GrowthRank", size, {"port": port}, _QUIET, _LAUNCHER) as ranks,
    ):
        for model in models:
            ordered = [model[name] for name in ("parameters", "num_bytes", "buckets")]
            by_rank = ranks.call("measure", *ordered, rounds, steps, dtype)
            row = {name: mean(each[name] for each in by_rank) for name in by_rank[0]}
            row["attach"] = max(each["attach"] for each in by_rank)
            row["requests"] = min(each["requests"] for each in by_rank)
            found.append(row)
    return found


def _joined(rows: Sequence[Mapping[str, float]]) -> Curve:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _simulate(name: str, arguments: argparse.Namespace) -> Curve:
    """Return what all-reduce by an algorithm costs a rank: its messages, and arrays of the size sent; and seconds."""
    from pycomm import schedule

    made = [schedule.by_name(name, ranks, 8) for ranks in arguments.simulated]
    stats = [each.stats() for each in made]
    return {
        "messages": [each.messages for each in stats],
        "sent": [each.max_sent * _SIMULATED_BYTES for each in stats],
        "seconds": [schedule.simulate(each, _SIMULATED_BYTES, _NETWORK) for each in made],
    }


def _shown(title: str, points: Sequence[int], curve: Curve, laws: Mapping[str, Law]) -> dict[str, Any]:
    """Print a curve with its exponents; return it for the report."""
    costs: dict[str, dict[str, Any]] = {
        name: {
            "values": curve[name],
            "exponent": exponent(points, curve[name]),
            "expected": expected(law, points),
            "law": law.text,
            "counted": law.counted,
        }
        for name, law in laws.items()
    }
    print(f"\n{title}")
    write = size_text if title == "bytes" else str
    rows = [
        [name, *(_cell(name, value) for value in cost["values"]), f"{cost['exponent']:.2f}", f"{cost['expected']:.2f}"]
        for name, cost in costs.items()
    ]
    print_table(["", *map(write, points), "exponent", "law's"], rows)
    return {"points": list(points), "costs": costs}


def _cell(name: str, value: float) -> str:
    if name in _SECONDS:
        return duration(value)
    if name in _BYTES:
        return f"{value / 1e6:.3g} MB"
    return f"{value:.4g}"
