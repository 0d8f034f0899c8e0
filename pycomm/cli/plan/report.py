"""Output of ``pycomm plan``."""

from __future__ import annotations

from pycomm.cli.table import print_table
from pycomm.descriptions import size_text
from pycomm.schedule import by_name
from pycomm.schedule.choose import Ranking
from pycomm.schedule.network import Network
from pycomm.untrusted import one_line

_SMALL_BYTES = 1024.0  # only latency counts at this size


def print_ranking(ranking: Ranking, nbytes: float) -> None:
    """Print the algorithms for one size, the crossovers, and the family with masters."""
    network = ranking.network
    hosts = "one host" if network.per_host is None else f"{network.per_host} per host"
    source = "measured" if ranking.measured else "simulated"
    name = one_line(network.name)
    print(f"all_reduce of {size_text(nbytes)} among {ranking.num_ranks} ranks, {hosts}, network {name} ({source})")
    for name, link in (("within a host", network.within_host), ("between hosts", network.between_hosts)):
        print(f"  {name:13}  {_link_text(link.alpha, link.beta, link.gamma)}")
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
    """Return how many steps an algorithm has; "" for the transport's own, and for what a file calls by another name."""
    try:
        return str(sum(1 for _ in by_name(name, num_ranks).rounds()))
    except ValueError:
        return ""


def _print_masters(ranking: Ranking) -> None:
    """Print which group size is best for one master per group, for arrays so small that only latency counts."""
    named = [name for name in ranking.curves if _is_masters(name) and _steps(name, ranking.num_ranks)]
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


def _is_masters(name: str) -> bool:
    return name.startswith("hierarchical(") and name.count(",") == 1


def print_calibration(network: Network) -> None:
    """Print the links and the times that were measured."""
    print(f"\n{one_line(network.name)}")
    print(f"  every collective  {time_text(network.overhead)} besides its messages")
    for name, link in (("within a host", network.within_host), ("between hosts", network.between_hosts)):
        print(f"  {name:16}  {_link_text(link.alpha, link.beta, link.gamma)}")
    sizes = [size for size, _ in next(iter(network.measured.values()))]
    print("\nmeasured")
    rows = [[name, *(time_text(seconds) for _, seconds in curve)] for name, curve in network.measured.items()]
    print_table(["algorithm", *(size_text(size) for size in sizes)], rows, indent="  ")


def time_text(seconds: float) -> str:
    """Write a time with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _link_text(alpha: float, beta: float, gamma: float) -> str:
    rates = [f"{1 / cost / 1e9:.3g} GB/s" if cost > 0 else "no time" for cost in (beta, gamma)]
    return f"{time_text(alpha)} per message, {rates[0]} sent, {rates[1]} added"
