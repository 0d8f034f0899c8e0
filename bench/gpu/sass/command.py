"""Machine code of the CUDA kernels, read without a GPU: registers, spills, blocks, and loads under way at once.

    python -m bench.gpu.sass [--output FILE] [NAME ...]

Compiles csrc/kernels/cuda/*.cu (or NAME.cu alone) for sm_90 with the project's flags and prints, for
every kernel: registers and bytes spilled (stores and loads), bytes of stack and of shared memory, blocks
of 256 threads that run at once on a multiprocessor, and how many loads of 16 bytes a thread issues
before it waits for the first of them, in the loop that has the fewest of those that have any (a kernel
for several types has a loop for each). Narrow loads have 2, 4 or 8 bytes, as "8x4" (eight of
four bytes), each in the loop that has the most. In flight is what the loads of 16 bytes of all threads
of a multiprocessor come to.

How much must be in flight follows from Little's law: bytes per second times seconds. At 4.3 TB/s, what a
copy moves on an H200 (reads and writes), and a latency of 750 ns (an assumption: 550-600 idle, more under
load), 85 % of it over 132 multiprocessors are

    0.85 x 4.3e12 B/s x 750e-9 s / 132 = 20.8 KB (20.3 KiB) per multiprocessor

for a kernel that only reads; one that writes as much as it reads needs half of it in loads. It is a
bound from one side: blocks also look for their arrays, compute and store, and load nothing meanwhile,
so that twice as much is none too much.

Counted is what the instructions allow. A thread has less under way where its share of a block is
smaller (quantize with blocks of 256 elements has two packets for each lane, not four) and where a load
has a condition that does not hold (the states that a step's rule may have, and does not).

Exit status: 0; 1 if a kernel is beyond its limit (limits.py) or does not compile; 2 without nvcc.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.sass.kernels import ARCHITECTURE, MULTIPROCESSORS, SOURCES, Kernel, compile_kernels, find_nvcc
from bench.gpu.sass.limits import limit_of
from bench.harness.arguments import plain_parser
from bench.harness.unbuilt import print_table

_COPY_BYTES_PER_SECOND = 4.3e12
_LATENCY_SECONDS = 750e-9
_SHARE = 0.85
WANTED_IN_FLIGHT = _SHARE * _COPY_BYTES_PER_SECOND * _LATENCY_SECONDS / MULTIPROCESSORS

_HEADER = (
    "kernel",
    "registers",
    "spilled",
    "stack",
    "shared",
    "blocks",
    "16-byte\nloads",
    "in flight\nKiB",
    "narrow\nloads",
    "within\nlimits",
)


def main() -> int:
    arguments = _parse()
    nvcc = find_nvcc()
    if nvcc is None:
        print("bench.gpu.sass: no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda*", file=sys.stderr)
        return 2
    sources = [SOURCES / f"{name}.cu" for name in arguments.names] or sorted(SOURCES.glob("*.cu"))
    if missing := [source for source in sources if not source.exists()]:
        print(f"bench.gpu.sass: {missing[0].name} is not in {SOURCES}", file=sys.stderr)
        return 1
    try:
        kernels = compile_kernels(nvcc, sources)
    except RuntimeError as error:
        print(f"bench.gpu.sass: {error}", file=sys.stderr)
        return 1
    complaints = {kernel.name: complaints_about(kernel) for kernel in kernels}
    _print(kernels, complaints)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(report(kernels, complaints), indent=1) + "\n")
    return 1 if any(complaints.values()) else 0


def _parse() -> argparse.Namespace:
    parser = plain_parser("bench.gpu.sass", __doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a file, as in pack for pack.cu; all by default")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the figures to FILE, as JSON")
    return parser.parse_args()


def complaints_about(kernel: Kernel) -> list[str]:
    """Return which figures of ``kernel`` are beyond its limits."""
    limit = limit_of(kernel)
    return [f"{kernel.name}: no limit"] if limit is None else list(limit.complaints(kernel))


def _print(kernels: Sequence[Kernel], complaints: dict[str, list[str]]) -> None:
    print_table(_HEADER, [_cells(kernel, not complaints[kernel.name]) for kernel in kernels])
    print(f"\nwanted in flight for 85 % of a copy, by reads alone: {WANTED_IN_FLIGHT / 1024:.1f} KiB")
    for complaint in (complaint for several in complaints.values() for complaint in several):
        print(complaint)


def _cells(kernel: Kernel, within: bool) -> list[str]:
    of = kernel.resources
    numbers = (of.registers, of.spilled, of.stack, of.shared, of.blocks, kernel.packet_loads)
    flight = f"{kernel.bytes_in_flight >> 10}" if kernel.packet_loads else "-"
    return [kernel.name, *map(str, numbers), flight, kernel.narrow_loads, "yes" if within else "NO"]


def report(kernels: Sequence[Kernel], complaints: dict[str, list[str]]) -> dict[str, Any]:
    """Return all figures, as ``--output`` has them."""
    rows = [
        {
            "name": kernel.name,
            **asdict(kernel.resources),
            "blocks": kernel.resources.blocks,
            "packet_loads": kernel.packet_loads,
            "bytes_in_flight": kernel.bytes_in_flight,
            "loops": [asdict(run) for run in kernel.runs],
            "complaints": complaints[kernel.name],
        }
        for kernel in kernels
    ]
    return {
        "bench": "gpu.sass",
        "architecture": ARCHITECTURE,
        "wanted_bytes_in_flight": WANTED_IN_FLIGHT,
        "kernels": rows,
    }
