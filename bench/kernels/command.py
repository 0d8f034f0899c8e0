"""The CPU kernels against torch and against the memory's speed, on ResNet-50's gradients and parameters.

    python -m bench.kernels [--only TEXT] [--json FILE]

Every line: the median time of a kernel over the rounds with its 10th and 90th percentile; torch's
for the same, and how many times faster pycomm is; and the floor, the time that the bytes which have
to move take at the speed measured in the same run, with our time over it. That speed is a copy's
(bytes read plus bytes written; the faster of numpy's and torch's, plain stores: a kernel that writes
past the caches can go below 1) or, where next to nothing is written, the speed of reading alone (the
faster of torch's sum and pycomm's absmax).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness.arguments import plain_parser
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, duration, interleave, stopwatch, times
from bench.kernels import compression, dense, optimizers, passes, sparse, steps
from bench.kernels.case import Arrays, Call, Calls, Case
from bench.kernels.resnet50 import parameter_shapes
from pycomm import kernels
from pycomm.tools.cli.arguments import integer
from pycomm.tools.cli.table import print_table

_COPIES = ("numpy copy", "torch copy")
_READS = ("torch sum", "pycomm absmax")
_WRONG = 7  # exit code for wrong results, as of ``pycomm bench`` and nccl-tests


def main() -> int:
    """Verify the kernels, measure them, print and write the figures; return the exit code."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    arrays = Arrays(parameter_shapes()[: arguments.shapes])
    cases = [case for case in make_cases(arrays.count) if arguments.only in case.name]
    if not cases:
        arguments.error(f"--only: no kernel has {arguments.only!r} in its name")
    print(f"{headline()}\n{arguments.threads} thread(s), {arguments.rounds} rounds")
    calls = {case.name: case.make(arrays) for case in cases}
    try:
        for made in calls.values():
            made.verify()
    except AssertionError as error:
        print(f"bench.kernels: {error}", file=sys.stderr)
        return _WRONG
    print(f"verified: {'; '.join(calls)}")
    _measure(arrays, cases, calls, arguments)
    return 0


def _parse() -> argparse.Namespace:
    parser = plain_parser("bench.kernels", __doc__)
    add = parser.add_argument
    add("-J", "--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add("--rounds", type=integer(1), default=15, help="turns that everything measured gets (default 15)")
    add("--only", default="", metavar="TEXT", help="only kernels with this in their name")
    add("--shapes", type=integer(1), help="only the first so many of the 161 parameters")
    add("--threads", type=integer(1), default=1, help="threads for pycomm and torch (default 1)")
    parser.set_defaults(error=parser.error)
    return parser.parse_args()


def _measure(arrays: Arrays, cases: list[Case], calls: dict[str, Calls], arguments: argparse.Namespace) -> None:
    samples = interleave(_everything(arrays, calls), arguments.rounds)
    speeds = _speeds(arrays, samples)
    print(
        f"measured on {4 * arrays.count / 1e6:.0f} MB: copy {speeds['copy'] / 1e9:.1f} GB/s (read + written), "
        f"read {speeds['read'] / 1e9:.1f} GB/s\n"
    )
    rows = [_figures(case, samples, speeds) for case in cases]
    _print(rows)
    settings = {"threads": arguments.threads, "rounds": arguments.rounds, "elements": arrays.count}
    floors = {name: samples[name].as_json() for name in _COPIES + _READS}
    write_json(arguments.json, "kernels", settings, {"bytes_per_second": speeds, "floors": floors, "rows": rows})


def make_cases(n: int) -> list[Case]:
    """Return what is measured on a CPU, in the order of the table, for gradients of ``n`` elements."""
    return [
        dense.pack(n),
        dense.pack_half(n),
        dense.unpack(n),
        dense.unpack_half(n),
        dense.reduce(n),
        dense.reduce(n, half=True),
        dense.accumulate(n),
        dense.absmax(n),
        dense.hashes(n),
        sparse.topk(n, 0.001),
        sparse.topk(n, 0.01),
        sparse.scatter_add(n, 0.01),
        sparse.dgc_step(n, 0.001, warm=True),
        sparse.dgc_step(n, 0.001, warm=False),
        *_codes(n, compression.INT8),
        *_codes(n, compression.INT4),
        *_codes(n, compression.E4M3),
        compression.sign_pack(n),
        compression.sign_unpack(n),
        compression.chunk_pack(n),
        compression.chunk_unpack(n),
        *passes.make_cases(n, [compression.INT8, compression.INT4, compression.E4M3]),
        sparse.indices_to_bits(),
        sparse.bits_to_indices(),
        steps.squared_norms(n),
        steps.lars(n),
        steps.adam(n, unscale=True),
        *optimizers.make_cases(n),
    ]


def _codes(n: int, of: compression.Format) -> list[Case]:
    take = (compression.encode, compression.encode_in_place, compression.decode, compression.requantize)
    return [case(n, of) for case in take]


def _everything(arrays: Arrays, calls: dict[str, Calls]) -> dict[str, Callable[[], float]]:
    source, target = arrays.flat, arrays.out
    from_numpy, to_numpy = source.numpy(), target.numpy()
    turns: dict[str, Callable[[], float]] = {
        "numpy copy": partial(stopwatch, lambda: np.copyto(to_numpy, from_numpy)),
        "torch copy": partial(stopwatch, lambda: target.copy_(source)),
        "torch sum": partial(stopwatch, source.sum),
        "pycomm absmax": partial(stopwatch, lambda: kernels.absmax([source])),
    }
    for name, made in calls.items():
        turns[name] = partial(stopwatch, made.ours)
        turns[f"torch: {name}"] = partial(_peer_turn, made.prepare, made.peer)
    return turns


def _peer_turn(prepare: Call, peer: Call) -> float:
    prepare()
    return stopwatch(peer)


def _speeds(arrays: Arrays, samples: dict[str, Samples]) -> dict[str, float]:
    """Return the bytes per second of the fastest way, by its median."""
    return {
        "copy": 8 * arrays.count / min(samples[name].median for name in _COPIES),
        "read": 4 * arrays.count / min(samples[name].median for name in _READS),
    }


def _figures(case: Case, samples: dict[str, Samples], speeds: dict[str, float]) -> dict[str, Any]:
    ours, peer = samples[case.name], samples[f"torch: {case.name}"]
    floor = case.floor_bytes / speeds[case.floor]
    return {
        "kernel": case.name,
        "pycomm": ours.as_json(),
        "peer": case.peer_name,
        "torch": peer.as_json(),
        "times_faster": peer.median / ours.median,
        "floor": {"kind": case.floor, "bytes": case.floor_bytes, "seconds": floor},
        "time_over_floor": ours.median / floor,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    header = ["kernel", "pycomm", "p10 - p90", "torch", "p10 - p90", "faster", "floor", "time / floor"]
    print_table(header, [_cells(row) for row in rows])
    print("\ntorch's side:")
    for row in rows:
        print(f"  {row['kernel']}: {row['peer']}")


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["kernel"]]
    for side in ("pycomm", "torch"):
        cells += Samples.of(row[side]["samples"]).cells()
    floor = row["floor"]
    return [
        *cells,
        times(row["times_faster"]),
        f"{duration(floor['seconds'])} ({floor['kind']})",
        times(row["time_over_floor"]),
    ]
