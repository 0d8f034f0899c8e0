"""all_reduce over slow links: what it takes, and what simulation said it would.

    python -m bench.slow_network.link [--gigabits 1] [--hosts 2] [--per-host 1] [--sizes 64K,1M,8M,32M] [--json FILE]

On hosts made of network namespaces (bench.slow_network.namespaces; Linux, root), ranks calibrate over torch.distributed
and Gloo, and then run several algorithms in turns: sum of float32, in place. A turn is a block of calls
after a barrier, its figure the slowest rank's time over its calls; every algorithm is verified first. The
simulated time is what pycomm.schedule.simulate says of the same table, on the network that calibration
found, by its links alone: what calibration measured of whole algorithms is struck out. "native" is
Gloo's own all_reduce, of which there is no table. "auto" is a communicator that chooses by the
calibrated network with all that it knows. K and M are 2^10 and 2^20 bytes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from bench.harness.arguments import make_parser, positive, sizes
from bench.harness.results import headline, write_json
from bench.harness.timing import Samples, duration, interleave, times
from bench.slow_network.namespaces import Host, available, go_first, hosts, run_ranks
from pycomm import schedule
from pycomm.collectives.communicator import Communicator
from pycomm.schedule import Network
from pycomm.tools.cli.table import print_table
from pycomm.training.cost.calibration import SIZES, calibrate

ALGORITHMS = ("ring", "recursive_doubling", "halving_doubling", "circulant", "direct")
CASES = (*ALGORITHMS, "native", "auto")
TOLERANCE = 0.15  # of what simulation says
_BLOCK_BYTES = 1 << 20  # calls of a block are as many as move this
_MOST_CALLS = 10


@dataclass(frozen=True)
class Figures:
    """Figures of all algorithms.

    Attributes:
        network: as calibrated.
        measured: bytes -> algorithm, "native" or "auto" -> seconds of a call, by the slowest rank.
        calibration_seconds: how long calibrating took.
    """

    num_ranks: int
    network: Network
    measured: dict[int, dict[str, Samples]]
    calibration_seconds: float

    def simulated(self, name: str, num_bytes: int) -> float:
        """Return the seconds that the table of ``name`` takes by the calibrated links alone."""
        links = replace(self.network, measured={}, measured_ranks=0)
        return float(schedule.simulate(schedule.by_name(name, self.num_ranks), num_bytes, links))

    def ratio(self, name: str, num_bytes: int) -> float:
        """Return measured over simulated seconds."""
        return self.measured[num_bytes][name].median / self.simulated(name, num_bytes)

    def chosen(self, num_bytes: int) -> str:
        """Return the algorithm that "auto" takes."""
        ranking = schedule.rank_algorithms(self.num_ranks, self.network)
        return [name for size, name in ranking.crossovers() if size <= num_bytes][-1]


def measure(
    cluster: Sequence[Host],
    sizes: Sequence[int],
    rounds: int,
    names: Sequence[str] = CASES,
    per_host: int = 1,
    curves: Sequence[int] = SIZES,
    timeout: float = 600.0,
) -> Figures:
    """Calibrate and measure on ``cluster``.

    Args:
        names: of algorithms, "native" and "auto" among them.
        curves: bytes at which calibration measures whole algorithms, which "auto" goes by.

    Raises:
        RankError: a rank failed, or they were not done in ``timeout`` seconds.
    """
    setup = {"sizes": list(sizes), "rounds": rounds, "names": list(names), "curves": list(curves)}
    outputs = run_ranks(cluster, "bench.slow_network.link", ["rank", json.dumps(setup)], per_host, timeout)
    found = json.loads(outputs[0].splitlines()[-1])
    return Figures(
        num_ranks=len(cluster) * per_host,
        network=Network.from_json(found["network"]),
        measured={
            int(size): {name: Samples.of(seconds) for name, seconds in row.items()}
            for size, row in found["measured"].items()
        },
        calibration_seconds=found["calibration_seconds"],
    )


def main() -> None:
    arguments = _parse()
    reason = available()
    if reason is not None:
        sys.exit(f"no network namespaces here: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order, so that no namespace stays
    print(headline())
    with hosts(arguments.hosts, arguments.gigabits or None) as cluster:
        figures = measure(cluster, arguments.sizes, arguments.rounds, per_host=arguments.per_host)
    _print(figures, arguments)
    settings = {key: getattr(arguments, key) for key in ("gigabits", "hosts", "per_host", "rounds")}
    write_json(arguments.json, "slow_link", settings, _as_json(figures))


def _parse() -> argparse.Namespace:
    parser = make_parser("bench.slow_network.link", __doc__)
    parser.add_argument(
        "--gigabits", type=float, default=1.0, help="of each link, per second; 0: unlimited (default 1)"
    )
    parser.add_argument("--hosts", type=positive, default=2, help="(default 2)")
    parser.add_argument(
        "--per-host", type=positive, default=1, help="ranks of each host, which share its link (default 1)"
    )
    parser.add_argument("--sizes", type=sizes, default="64K,1M,8M,32M", help="bytes, with K or M")
    return parser.parse_args()


def _print(figures: Figures, arguments: argparse.Namespace) -> None:
    limit = f"{arguments.gigabits:g} Gbit/s" if arguments.gigabits else "unlimited"
    print(f"\nall_reduce, sum of float32, {arguments.hosts} hosts, {arguments.per_host} ranks each, links {limit}")
    network = figures.network
    print(f"calibrated in {figures.calibration_seconds:.1f} s: {duration(network.overhead)} per operation")
    for label, link in (("within a host", network.within_host), ("between hosts", network.between_hosts)):
        rate = f"{8e-9 / link.beta:.3f} Gbit/s" if link.beta else "no time per byte"
        if label == "between hosts" or arguments.per_host > 1:
            print(f"  {label}: {duration(link.alpha)} per message, {rate}, {link.gamma * 1e9:.2f} ns per byte added")
    for num_bytes, row in figures.measured.items():
        print(f"\n{num_bytes / 1024:g} KB")
        header = ["", "measured", "p10 - p90", "simulated", "measured / simulated"]
        print_table(header, [_cells(figures, num_bytes, name) for name in row])
        best = min((name for name in row if name != "auto"), key=lambda name: row[name].median)
        ratio = row["auto"].median / row[best].median
        print(f"auto took {figures.chosen(num_bytes)}: {times(ratio)} of {best}, the best measured")
    off = [
        f"{name} at {num_bytes / 1024:g} KB ({figures.ratio(name, num_bytes) - 1:+.0%})"
        for num_bytes, row in figures.measured.items()
        for name in row
        if _has_table(name) and abs(figures.ratio(name, num_bytes) - 1) > TOLERANCE
    ]
    print(f"\nbeyond {TOLERANCE:.0%} of simulated: {', '.join(off) or 'none'}")


def _cells(figures: Figures, num_bytes: int, name: str) -> list[str]:
    cells = [name, *figures.measured[num_bytes][name].cells()]
    if not _has_table(name):
        return [*cells, "-", "-"]
    return [*cells, duration(figures.simulated(name, num_bytes)), f"{figures.ratio(name, num_bytes):.3f}"]


def _has_table(name: str) -> bool:
    return name not in ("native", "auto")


def _as_json(figures: Figures) -> dict[str, Any]:
    return {
        "network": json.loads(figures.network.to_json()),
        "calibration_seconds": figures.calibration_seconds,
        "all_reduce": [
            {
                "bytes": num_bytes,
                "auto": figures.chosen(num_bytes),
                "seconds_per_call": {name: samples.as_json() for name, samples in row.items()},
                "simulated": {name: figures.simulated(name, num_bytes) for name in row if _has_table(name)},
            }
            for num_bytes, row in figures.measured.items()
        ],
    }


def _serve(setup: dict[str, Any]) -> None:
    """Be a rank. Rank 0 prints what was found."""
    torch.set_num_threads(1)
    go_first()  # before Gloo starts its thread
    dist.init_process_group("gloo")
    with Communicator(transport="torch") as communicator:
        start = time.perf_counter()
        network = calibrate(communicator, setup["curves"])
        calibration_seconds = time.perf_counter() - start
        with Communicator(transport="torch", network=network) as choosing:
            measured = {size: _measure(communicator, choosing, size, setup) for size in setup["sizes"]}
    if dist.get_rank() == 0:
        found = {"network": network.to_json(), "measured": measured, "calibration_seconds": calibration_seconds}
        print(json.dumps(found))
    dist.destroy_process_group()


def _measure(
    communicator: Communicator, choosing: Communicator, num_bytes: int, setup: dict[str, Any]
) -> dict[str, tuple[float, ...]]:
    cases = {name: _case(choosing if name == "auto" else communicator, name, num_bytes) for name in setup["names"]}
    return {name: samples.seconds for name, samples in interleave(cases, setup["rounds"]).items()}


def _case(communicator: Communicator, name: str, num_bytes: int) -> Callable[[], float]:
    """Verify a case, and return what takes its turn: a function that gives the slowest rank's seconds per call."""
    x = torch.full((num_bytes // 4,), float(communicator.rank + 1))
    communicator.all_reduce(x, algorithm=name)
    expected = sum(range(1, communicator.size + 1))
    if not bool((x == expected).all()):
        raise AssertionError(f"{name}: the sum is not {expected} everywhere")
    calls = max(1, min(_MOST_CALLS, _BLOCK_BYTES // num_bytes))

    def turn() -> float:
        x.zero_()  # sums stay what they are, however often
        communicator.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            communicator.all_reduce(x, algorithm=name)
        slowest = torch.tensor([(time.perf_counter() - start) / calls], dtype=torch.float64)
        communicator.all_reduce(slowest, "max", algorithm="native")
        return float(slowest)

    return turn


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _serve(json.loads(sys.argv[2]))
    else:
        main()
