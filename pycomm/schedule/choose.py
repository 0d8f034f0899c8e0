"""Choice of an algorithm, by the number of ranks, the size of the array and the network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pycomm.schedule.algorithms import by_name
from pycomm.schedule.algorithms.folding import core_size
from pycomm.schedule.network import Network, load
from pycomm.schedule.simulate import simulate
from pycomm.schedule.table import require_ranks

Floats = npt.NDArray[np.float64]

SIZES = tuple(float(2 ** (10 + 2.5 * i)) for i in range(9))
"""1 KiB to 1 GiB."""

_FLAT = ("ring", "recursive_doubling", "halving_doubling", "binary_blocks", "circulant", "direct")
_TREES = ("double_tree(2)", "double_tree", "double_tree(128)")
_STEPS = 200  # sizes at which crossovers are looked for


@dataclass(frozen=True)
class Ranking:
    """Ranking of algorithms: the seconds of each as a function of size.

    Attributes:
        curves: algorithm -> (sizes in bytes, increasing; seconds).
        measured: whether the seconds were measured on the network; simulated otherwise.
    """

    num_ranks: int
    network: Network
    curves: dict[str, tuple[Floats, Floats]]
    measured: bool

    def seconds(self, name: str, nbytes: float) -> float:
        """Return the time of ``name`` for ``nbytes``.

        Interpolated linearly between known sizes, extrapolated from the last two, constant before the first.
        """
        sizes, times = self.curves[name]
        if nbytes <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(nbytes, sizes, times))
        slope = max(0.0, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
        return float(times[-1] + slope * (nbytes - sizes[-1]))

    def at(self, nbytes: float) -> list[tuple[str, float]]:
        """Return (algorithm, seconds), the fastest first."""
        return sorted(((name, self.seconds(name, nbytes)) for name in self.curves), key=lambda pair: pair[1])

    def crossovers(self, tolerance: float = 0.05) -> list[tuple[float, str]]:
        """Return (size, algorithm): the algorithm to use from that size on; the first size is 0.

        An algorithm is kept while it takes at most ``tolerance`` more than the fastest, so that noise and
        ties make no crossovers.
        """
        begin = min(float(sizes[0]) for sizes, _ in self.curves.values())
        end = max(float(sizes[-1]) for sizes, _ in self.curves.values())
        found: list[tuple[float, str]] = []
        for size in np.geomspace(max(begin, 1.0), max(end, 2.0), _STEPS).tolist():
            best, seconds = self.at(size)[0]
            if not found:
                found.append((0.0, best))
            elif self.seconds(found[-1][1], size) > (1 + tolerance) * seconds:
                found.append((size, best))
        return found


def candidates(num_ranks: int, per_host: int | None = None) -> list[str]:
    """Return the names, for :func:`by_name`, of the algorithms to consider among ``num_ranks`` ranks.

    Rows or groups of a grid have ``per_host`` ranks, if that divides ``num_ranks``, or as many as the divisor
    closest to the square root. Grids with masters also use every divisor with at most three times the fewest
    steps.
    """
    num_ranks = require_ranks(num_ranks)
    if num_ranks == 1:
        return ["ring"]
    names = [*_FLAT, *_TREES]
    divisors = [d for d in range(2, num_ranks // 2 + 1) if num_ranks % d == 0]
    hosts = [per_host] if per_host in divisors else []
    square = [min(divisors, key=lambda d: abs(d * d - num_ranks))] if divisors else []
    for size in dict.fromkeys([*hosts, *square]):
        names.append(f"torus({size},{num_ranks // size})")
        if core_size(size) == size:
            names.append(f"torus({size},{num_ranks // size},halving_doubling,circulant)")
    names += [f"circulant({size})" for size in hosts]
    steps = {d: 4 * (d - 1) + 2 * (num_ranks // d - 1) for d in divisors}
    masters = [d for d in divisors if d in hosts or steps[d] <= 3 * min(steps.values())]
    names += [f"hierarchical({num_ranks // d},{d})" for d in masters]
    names += [f"hierarchical({num_ranks // d},{d},binomial,circulant)" for d in hosts]
    return names


def rank_algorithms(
    num_ranks: int,
    network: Network | str | os.PathLike[str] | None = None,
    sizes: Sequence[float] = SIZES,
    names: Sequence[str] | None = None,
) -> Ranking:
    """Rank algorithms on ``network``: as measured there with the same number of ranks, else by simulation.

    Args:
        sizes: bytes to simulate, increasing. names: algorithms to simulate; :func:`candidates` if ``None``.

    Raises:
        ValueError: ``num_ranks`` < 1, unknown names, or a network that :func:`load` refuses.
    """
    num_ranks = require_ranks(num_ranks)
    network = load(network)
    if network.measured and network.measured_ranks == num_ranks and names is None:
        measured = {name: np.array(curve).T for name, curve in network.measured.items()}
        return Ranking(num_ranks, network, {name: (c[0], c[1]) for name, c in measured.items()}, True)
    grid = np.asarray(sizes, np.float64)
    curves = {}
    for name in candidates(num_ranks, network.per_host) if names is None else names:
        curves[name] = (grid, simulate(by_name(name, num_ranks), grid, network))
    return Ranking(num_ranks, network, curves, False)


def choose(num_ranks: int, nbytes: float, network: Network | str | os.PathLike[str] | None = None) -> str:
    """Return the name, for :func:`by_name`, of the fastest algorithm for ``nbytes`` among ``num_ranks`` ranks.

    On a network measured with as many ranks it may also be "native": the transport's own.

    Raises:
        ValueError: ``num_ranks`` < 1, a negative size, or a network that :func:`load` refuses.
    """
    if not nbytes >= 0:
        raise ValueError(f"nbytes is {nbytes!r}, wanted a size that is not negative")
    return rank_algorithms(num_ranks, network, [float(nbytes)]).at(nbytes)[0][0]
