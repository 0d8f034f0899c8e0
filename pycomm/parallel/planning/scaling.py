"""Efficiency of many devices, T = S N e: S the throughput of one device, N their number, e the efficiency.

Forms of e, each with one parameter that is fitted to measured throughputs together with S:

- ``constant``: e is the same for every N above 1.
- ``amdahl``: the problem has a fixed size, and a fraction s of it is serial. N devices take s + (1 - s) / N of its
  time: the speedup N e is 1 / (s + (1 - s) / N) (Amdahl, 1967).
- ``gustafson``: the problem grows with N, except for a serial part that takes a fraction s of each device's time: the
  scaled speedup N e is N - s (N - 1) (Gustafson, 1988).
- ``network``: every device computes as long as one alone, and then waits for the exposed part of its gradients'
  all-reduce: e = 1 / (1 + q c(N)). c(N) is the time of the fastest algorithm on a network in seconds, and q the
  exposed part of it per second of computation.

Fits minimise the sum of the squares of relative errors: throughputs of 1 and of 1,000 devices count alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pycomm import checks, untrusted
from pycomm.schedule import Network, rank_algorithms

MOST_DEVICES = 4096
FORMS = ("constant", "amdahl", "gustafson", "network")

_ALL_ALGORITHMS = 256  # devices up to which every algorithm is simulated; beyond, only those that scale
_GRID = 400  # parameters tried before the best is refined
_SMALLEST = 1e-9  # parameter above 0 that is tried: too small to show in a measurement
_LARGEST_RATE = 1e9  # q that is tried, times the longest communication
_REFINEMENTS = 80
_LARGEST_FILE = 1 << 20  # bytes, of points
_GOLDEN = (math.sqrt(5) - 1) / 2

Efficiency = Callable[[int, float], float]
Communication = Callable[[int], float]


@dataclass(frozen=True)
class Fit:
    """One form of the efficiency with its fitted parameters.

    Attributes:
        form: one of ``FORMS``.
        throughput: S, of one device, in the unit of the points.
        parameter: e (constant), s (amdahl, gustafson), or q in 1/seconds (network).
        residual: root of the mean square of the relative errors at the points; 0 if nothing was fitted.
        efficiency_of: e by the number of devices and the parameter.
    """

    form: str
    throughput: float
    parameter: float
    residual: float
    efficiency_of: Efficiency

    def efficiency(self, devices: int) -> float:
        """Return e of ``devices`` devices."""
        return self.efficiency_of(devices, self.parameter)

    def total(self, devices: int) -> float:
        """Return T, the throughput of ``devices`` devices together."""
        return self.throughput * devices * self.efficiency(devices)

    @property
    def limit(self) -> float:
        """Limit of the speedup for any number of devices; ``inf`` if the form has none."""
        return 1 / self.parameter if self.form == "amdahl" and self.parameter > 0 else math.inf


def amdahl(devices: int, serial: float) -> float:
    """Return the efficiency for a problem of fixed size with a serial fraction ``serial``."""
    return 1 / (1 + serial * (devices - 1))


def gustafson(devices: int, serial: float) -> float:
    """Return the efficiency for a problem that grows with the devices, except for ``serial`` of the time."""
    return 1 - serial * (devices - 1) / devices


def constant(devices: int, efficiency: float) -> float:
    """Return ``efficiency`` for more than one device."""
    return efficiency if devices > 1 else 1.0


def by_network(communication: Communication) -> Efficiency:
    """Return the efficiency of devices that wait for the parameter q times ``communication(N)`` seconds."""
    return lambda devices, rate: 1 / (1 + rate * communication(devices))


def all_reduce_seconds(nbytes: float, network: Network) -> Communication:
    """Return a function of the number of devices: seconds of the fastest all-reduce of ``nbytes`` on ``network``.

    The seconds are measured ones if the network was measured with as many ranks, else simulated.
    """

    @functools.cache
    def seconds(devices: int) -> float:
        if devices == 1:
            return 0.0
        names = None
        if devices > _ALL_ALGORITHMS and devices != network.measured_ranks:
            names = ["halving_doubling", "circulant", "double_tree(128)"]
            if network.per_host is not None and network.per_host > 1 and devices % network.per_host == 0:
                names.append(f"circulant({network.per_host})")
        return rank_algorithms(devices, network, [nbytes], names).at(nbytes)[0][1]

    return seconds


def predict(step: float, communication: Communication, overlap: float = 0.0) -> Fit:
    """Return the form ``network``, not fitted but computed; its throughput is in steps per second.

    Args:
        step: seconds that one device computes.
        overlap: fraction of the communication that computation hides, from 0 to 1.
    """
    step = checks.bounded("step", step, "a positive number of seconds", lambda s: 0 < s < math.inf)
    overlap = checks.bounded("overlap", overlap, "from 0 to 1", lambda share: 0 <= share <= 1)
    return Fit("network", 1 / step, (1 - overlap) / step, 0.0, by_network(communication))


def fit(points: Mapping[int, float], communication: Communication | None = None) -> list[Fit]:
    """Fit the forms to measured throughputs by the number of devices; the best first, by the residual.

    Args:
        points: throughput by number of devices, at least two.
        communication: seconds of communication by number of devices, for the form ``network``.
    """
    points = checked(points)
    forms: dict[str, tuple[Efficiency, Sequence[float]]] = {
        "amdahl": (amdahl, [0.0, *np.geomspace(_SMALLEST, 1, _GRID)]),
        "gustafson": (gustafson, [0.0, *np.geomspace(_SMALLEST, 1, _GRID)]),
    }
    if 1 in points:  # otherwise S and e cannot be told apart
        forms["constant"] = constant, np.linspace(1 / _GRID, 1, _GRID).tolist()
    if communication is not None:
        scale = 1 / max(max(map(communication, points)), 1e-30)
        rates = [0.0, *(scale * np.geomspace(_SMALLEST, _LARGEST_RATE, 2 * _GRID))]
        forms["network"] = by_network(communication), rates
    fits = [_fit(form, points, efficiency, grid) for form, (efficiency, grid) in forms.items()]
    return sorted(fits, key=lambda each: each.residual)


def _fit(form: str, points: Mapping[int, float], efficiency: Efficiency, grid: Sequence[float]) -> Fit:
    """Find the parameter by trying ``grid`` and then searching between the best one's neighbours; S follows."""

    def error(parameter: float) -> float:
        return _scaled(points, efficiency, parameter)[1]

    best = min(range(len(grid)), key=lambda i: error(grid[i]))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    for _ in range(_REFINEMENTS):
        first, second = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if error(first) <= error(second):
            high = second
        else:
            low = first
    parameter = min((low, high, grid[best]), key=error)
    throughput, squares = _scaled(points, efficiency, parameter)
    return Fit(form, throughput, float(parameter), math.sqrt(squares / len(points)), efficiency)


def _scaled(points: Mapping[int, float], efficiency: Efficiency, parameter: float) -> tuple[float, float]:
    """Return the best S for ``parameter``, and the sum of the squares of its relative errors."""
    ratios = [devices * efficiency(devices, parameter) / measured for devices, measured in points.items()]
    throughput = math.fsum(ratios) / max(math.fsum(ratio * ratio for ratio in ratios), 1e-300)
    return throughput, math.fsum((throughput * ratio - 1) ** 2 for ratio in ratios)


def checked(points: Mapping[int, float]) -> dict[int, float]:
    """Return ``points``, sorted by the number of devices."""
    for devices, throughput in points.items():
        checks.integer("number of devices", devices, 1, MOST_DEVICES)
        name = f"throughput of {devices} devices"
        # Ratios of numbers much larger or smaller would not be finite.
        checks.bounded(name, throughput, "a number from 1e-100 to 1e100", lambda value: 1e-100 <= value <= 1e100)
    if len(points) < 2:
        raise ValueError(f"there are {len(points)} points, wanted throughputs of at least two numbers of devices")
    return {devices: float(points[devices]) for devices in sorted(points)}


def read_points(path: Path) -> dict[int, float]:
    """Read measured throughputs from a JSON file: ``[[1, 100.0], [2, 190.0]]``, devices and throughput."""
    try:
        data = untrusted.read_json(path, untrusted.ANYTHING, most=_LARGEST_FILE)
    except (OSError, ValueError) as error:
        raise ValueError(f"points file {path} cannot be read: {error}") from error
    if not isinstance(data, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in data):
        raise ValueError(f"points file {path} is {checks.shown(data)}, wanted [[devices, throughput], ...]")
    try:
        return checked(collected([(devices, throughput) for devices, throughput in data]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"points file {path}: {error}") from error


def collected(pairs: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Return pairs of devices and throughput as a mapping."""
    points: dict[int, float] = {}
    for devices, throughput in pairs:
        checks.integer("number of devices", devices, 1, MOST_DEVICES)
        if devices in points and points[devices] != throughput:
            raise ValueError(f"{devices} devices have throughputs {points[devices]} and {throughput}, wanted one")
        points[devices] = throughput
    return points
