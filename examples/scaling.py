"""Throughput of many devices, T = S N e: S of one device, N devices, e their efficiency.

    python examples/scaling.py --points 1:100 2:190 4:350
    python examples/scaling.py --points 1:100 2:190 4:350 --step 0.05 --bytes 1e8 --network ethernet-10g

Fits S and a serial fraction s to measured throughputs, by least squares of relative errors, in two forms:

- Amdahl (1967): the problem has a fixed size, and a fraction s of it is serial: e = 1 / (1 + s (N - 1)).
- Gustafson (1988): the problem grows with N, except for a serial part that takes a fraction s of each device's time:
  e = 1 - s (N - 1) / N.

With --step, the seconds that one device computes, it also predicts e = step / (step + all-reduce), without overlap: of
the fastest all-reduce of the gradients on a network that ``pycomm plan`` knows or ``pycomm plan calibrate`` measured.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from pycomm import schedule

Efficiency = Callable[[int, float], float]
SHOWN = [1 << i for i in range(13)]  # numbers of devices in the table, up to 4096
ALGORITHMS = ["halving_doubling", "circulant", "double_tree(128)"]  # that scale, to be simulated on many devices


def amdahl(devices: int, serial: float) -> float:
    """Return the efficiency for a problem of fixed size with a serial fraction ``serial``."""
    return 1 / (1 + serial * (devices - 1))


def gustafson(devices: int, serial: float) -> float:
    """Return the efficiency for a problem that grows with the devices, except for ``serial`` of the time."""
    return 1 - serial * (devices - 1) / devices


@dataclass(frozen=True)
class Fit:
    """S and s of one form; ``residual`` is the root of the mean square of the relative errors at the points."""

    efficiency: Efficiency
    throughput: float
    serial: float
    residual: float

    def total(self, devices: int) -> float:
        """Return T = S N e."""
        return self.throughput * devices * self.efficiency(devices, self.serial)


def fit(points: Mapping[int, float], efficiency: Efficiency) -> Fit:
    """Fit ``efficiency`` to throughputs by the number of devices: at least two."""
    if len(points) < 2 or min(points) < 1 or not all(0 < measured < math.inf for measured in points.values()):
        raise ValueError(f"points are {dict(points)}, wanted throughputs above 0 of at least two numbers of devices")
    counts, measured = np.array(list(points), float), np.array(list(points.values()))
    # Relative errors of T (Gustafson) or of 1 / T (Amdahl) are linear in two unknowns: S and S s, or 1 / S and s / S.
    weight = measured / counts if efficiency is amdahl else counts / measured
    share = counts - 1 if efficiency is amdahl else -(counts - 1) / counts
    ones = np.ones_like(share)
    (first, second), *_ = np.linalg.lstsq(weight[:, None] * np.stack([ones, share], axis=1), ones)
    serial = float(np.clip(second / first, 0.0, 1.0)) if first > 0 else 1.0
    ratios = np.array([devices * efficiency(devices, serial) / found for devices, found in points.items()])
    throughput = float(ratios.sum() / (ratios**2).sum())
    return Fit(efficiency, throughput, serial, float(np.sqrt(np.mean((throughput * ratios - 1) ** 2))))


def by_network(devices: int, step: float, nbytes: float, network: schedule.Network) -> float:
    """Return the efficiency of devices that compute for ``step`` seconds and then wait for their gradients' sum."""
    names = None if devices <= 256 or devices == network.measured_ranks else ALGORITHMS
    waits = schedule.rank_algorithms(devices, network, [nbytes], names).at(nbytes)[0][1] if devices > 1 else 0.0
    return step / (step + waits)


def point(text: str) -> tuple[int, float]:
    devices, _, throughput = text.partition(":")
    return int(devices), float(throughput)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=point, nargs="+", required=True, metavar="N:T", help="devices:throughput")
    parser.add_argument("--step", type=float, metavar="SECONDS", help="that one device computes")
    parser.add_argument("--bytes", type=float, default=1e8, help="of the gradients (default 1e8)")
    parser.add_argument("--network", help="a name or a file, as for pycomm plan ranks (default ethernet-10g)")
    arguments = parser.parse_args()
    points = dict(arguments.points)
    try:
        fits = {form.__name__: fit(points, form) for form in (amdahl, gustafson)}
        network = schedule.load(arguments.network)
    except ValueError as error:
        parser.error(str(error))
    for name, each in fits.items():
        print(f"{name}: S = {each.throughput:.4g}, s = {each.serial:.4g}, errors of {100 * each.residual:.2g} %")
    head = "".join(f"  {name + ' T':>12}      e" for name in fits)
    print(f"\ndevices  measured{head}" + (f"  e on {network.name}" if arguments.step else ""))
    for devices in sorted({*SHOWN, *points}):
        cells = f"{devices:7}  {points.get(devices, ''):>8}"
        for each in fits.values():
            cells += f"  {each.total(devices):12.5g}  {each.efficiency(devices, each.serial):5.3f}"
        if arguments.step:
            cells += f"  {by_network(devices, arguments.step, arguments.bytes, network):8.3f}"
        print(cells)
    print(f"Beyond {max(points)} devices nothing was measured.")


if __name__ == "__main__":
    main()
