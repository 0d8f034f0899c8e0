"""``pycomm plan ranks``: ranks all-reduce algorithms on a network, fastest first."""

from __future__ import annotations

import argparse

from pycomm.descriptions import size_text
from pycomm.schedule import by_name
from pycomm.schedule.choose import SIZES, Ranking, rank_algorithms
from pycomm.tools.cli.plan.report import link_text, network_of, time_text
from pycomm.tools.cli.table import print_table
from pycomm.untrusted import one_line

_SMALL_BYTES = 1024.0  # only latency counts at this size


def run(arguments: argparse.Namespace) -> int:
    """Print the ranking; return the exit code."""
    network = network_of(arguments)
    ranking = rank_algorithms(arguments.ranks, network, sorted({*SIZES, arguments.bytes}))
    print_ranking(ranking, arguments.bytes)
    return 0


def print_ranking(ranking: Ranking, nbytes: float) -> None:
    """Print the algorithms for one size, the crossovers, and the family with masters."""
    network = ranking.network
    hosts = "one host" if network.per_host is None else f"{network.per_host} per host"
    source = "measured" if ranking.measured else "simulated"
    name = one_line(network.name)
    print(f"all_reduce of {size_text(nbytes)} among {ranking.num_ranks} ranks, {hosts}, network {name} ({source})")
    for name, link in (("within a host", network.within_host), ("between hosts", network.between_hosts)):
        print(f"  {name:13}  {link_text(link.alpha, link.beta, link.gamma)}")
    order = ranking.at(nbytes)
    rows = []
    for name, seconds in order:
        rate = f"{nbytes / seconds / 1e9:.3g}" if seconds > 0 else ""
        times = f"{seconds / order[0][1]:.2f}" if order[0][1] > 0 else ""
        rows.append([one_line(name), _steps(name, ranking.num_ranks), time_text(seconds), times, rate])
    print()
    print_table(["algorithm", "steps", "time", "x best", "algbw GB/s"], rows, indent="  ")
    print("\nfastest, by size")
    for size, name in ranking.crossovers():
        print(f"  from {size_text(size):>8}  {one_line(name)}")
    _print_masters(ranking)


def _steps(name: str, num_ranks: int) -> str:
    """Return an algorithm's number of steps; "" for the transport's own, and for unknown names from a file."""
    try:
        return str(sum(1 for _ in by_name(name, num_ranks).rounds()))
    except ValueError:
        return ""


def _print_masters(ranking: Ranking) -> None:
    """Print the best group sizes of the algorithms with one master per group, for latency-bound arrays."""
    masters = [name for name in ranking.curves if name.startswith("hierarchical(") and name.count(",") == 1]
    named = [name for name in masters if _steps(name, ranking.num_ranks)]
    family = {name: ranking.seconds(name, _SMALL_BYTES) for name in named}
    if len(family) < 2:
        return
    best = min(family.values())
    names = [name for name, seconds in family.items() if seconds <= 1.01 * best]
    steps = _steps(names[0], ranking.num_ranks)
    print(
        f"\nof those with one master per group, fastest for small arrays: {', '.join(names)}: "
        f"{steps} steps against the ring's {2 * (ranking.num_ranks - 1)}"
    )
