"""``pycomm plan scaling``: predicts throughput and efficiency of up to 4,096 devices."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from pycomm import schedule
from pycomm.descriptions import size_text
from pycomm.parallel.planning.scaling import (
    MOST_DEVICES,
    Communication,
    Fit,
    all_reduce_seconds,
    checked,
    collected,
    fit,
    predict,
    read_points,
)
from pycomm.tools.cli.plan.report import draw, time_text
from pycomm.tools.cli.table import print_table
from pycomm.untrusted import one_line

_PARAMETERS = {
    "constant": "e = {:.4g}",
    "amdahl": "s = {:.4g}, not divided",
    "gustafson": "s = {:.4g}, does not grow",
    "network": "q = {:.4g} / s",
}


def run(arguments: argparse.Namespace) -> int:
    """Print fits or a prediction, and draw them if asked; return the exit code."""
    most = arguments.devices or MOST_DEVICES
    if most > MOST_DEVICES:
        raise ValueError(f"--devices is {most}, wanted at most {MOST_DEVICES}")
    fits, points = scale(arguments)
    shown = numbers(points, most)
    return draw("save_scaling", "throughput and efficiency", arguments, fits, points, shown)


def scale(arguments: argparse.Namespace) -> tuple[list[Fit], dict[int, float]]:
    """Print fits and a table; return the fits, the best first, and the measured points."""
    network = schedule.load(arguments.network) if arguments.network or arguments.points is None else None
    if network is not None:
        network = network.with_hosts_of(arguments.per_host)
    communication = None if network is None else all_reduce_seconds(arguments.bytes, network)
    points: dict[int, float] = {}
    if arguments.points is not None:
        points = _points(arguments.points)
        fits = fit(points, communication)
    elif arguments.step is not None and communication is not None:
        fits = [predict(arguments.step, communication, arguments.overlap)]
        if network is not None and network.measured_ranks > 1:  # communication of this many was measured
            points = {1: fits[0].throughput, network.measured_ranks: fits[0].total(network.measured_ranks)}
    else:
        raise ValueError("--points of measured throughputs are missing, or --step, the time that one device computes")
    print("throughput T = S N e: S of one device, N devices, e their efficiency\n")
    if network is not None:
        print(f"communication: all_reduce of {size_text(arguments.bytes)}, network {one_line(network.name)}")
    if arguments.points is None:
        measured = " (as measured)" if len(points) > 1 else ""
        hidden = f"{100 * arguments.overlap:g} % of communication{measured} hidden"
        print(f"predicted from {time_text(arguments.step)} of computation, {hidden}\n")
    else:
        _print_fits(fits, points, arguments.step)
    _print_table(fits, points, arguments.devices or MOST_DEVICES, communication)
    return fits, points


def numbers(points: Mapping[int, float], most: int) -> list[int]:
    """Return the numbers of devices to show: powers of two up to ``most``, ``most`` and the measured ones."""
    powers = [1 << i for i in range(most.bit_length())]
    return sorted({*powers, most, *points})


def _points(text: str) -> dict[int, float]:
    """Read points from ``text``: 1:100,2:190, or the name of a file."""
    if ":" not in text:
        return read_points(Path(text))
    pairs = []
    for word in text.split(","):
        devices, _, throughput = word.partition(":")
        try:
            pairs.append((int(devices), float(throughput)))
        except ValueError:
            raise ValueError(f"--points has {word!r}, wanted DEVICES:THROUGHPUT, such as 4:350.5") from None
    return checked(collected(pairs))


def _print_fits(fits: Sequence[Fit], points: Mapping[int, float], step: float | None) -> None:
    rows = []
    for each in fits:
        parameter = _PARAMETERS[each.form].format(each.parameter)
        if each.form == "network" and step is not None:
            parameter = f"{100 * each.parameter * step:.3g} % exposed"
        limit = f"{each.limit:.4g}" if each.limit < math.inf else ""
        rows.append([each.form, f"{each.throughput:.4g}", parameter, f"{100 * each.residual:.2g} %", limit])
    print(f"fitted to {len(points)} points, by least squares of relative errors; the best first")
    print_table(["form", "S", "parameter", "residual", "most speedup"], rows, indent="  ")
    if len(points) == 2:
        print("Two points cannot tell these forms apart: each has two numbers to fit. Measure more.")
    if all(each.residual > 0.1 for each in fits):
        print("No form describes these points to 10 %: look for what changes between them.")
    print()


def _print_table(
    fits: Sequence[Fit], points: Mapping[int, float], most: int, communication: Communication | None
) -> None:
    header = ["devices", "measured"]
    for each in fits:
        header += [f"{each.form}\nT", "e"]
    if communication is not None:
        header.append("communi-\ncation")
    rows = []
    for devices in numbers(points, most):
        row = [str(devices), f"{points[devices]:.4g}" if devices in points else ""]
        for each in fits:
            row += [f"{each.total(devices):.4g}", f"{100 * each.efficiency(devices):.1f} %"]
        if communication is not None:
            row.append(time_text(communication(devices)))
        rows.append(row)
    print_table(header, rows, indent="  ")
    if points and max(points) < most:
        print(f"\nBeyond {max(points)} devices nothing was measured.")
