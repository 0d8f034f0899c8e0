"""``pycomm plan compression``: whether compressing gradients pays."""

from __future__ import annotations

import argparse
import math

from pycomm.descriptions import size_text
from pycomm.tools.cli.plan.report import network_of, time_text
from pycomm.tools.cli.table import print_table
from pycomm.training.cost.planning import Priced, price
from pycomm.training.cost.pricing import CLEARLY_FASTER
from pycomm.untrusted import one_line


def run(arguments: argparse.Namespace) -> int:
    """Print the cost of every method, and whether one pays; return the exit code."""
    num_ranks, nbytes, network = arguments.ranks, arguments.bytes, network_of(arguments)
    priced = price(num_ranks, nbytes, network)
    dense = priced["dense"].seconds()
    print(f"gradients of {size_text(nbytes)}, {num_ranks} ranks, network {one_line(network.name)}")
    print("work measured on this machine, communication simulated, without overlap of the two\n")
    header = ["method", "sent", "work", "link", "together", "x dense", "pays below"]
    rows = [
        [
            name,
            size_text(each.sent_bytes),
            time_text(each.local),
            time_text(each.link),
            time_text(each.seconds()),
            f"{dense / each.seconds():.2f}",
            _rate_text(each.break_even),
        ]
        for name, each in priced.items()
    ]
    print_table(header, rows, indent="  ")
    print(f"\n{verdict(priced)}")
    return 0


def verdict(priced: dict[str, Priced]) -> str:
    """Return the advice in one sentence."""
    dense = priced["dense"].seconds()
    best = min(priced, key=lambda name: priced[name].seconds())
    seconds = priced[best].seconds()
    if seconds >= CLEARLY_FASTER * dense:
        return "Do not compress: nothing is clearly faster than dense gradients on this network."
    mildest = next(name for name, each in priced.items() if each.seconds() < CLEARLY_FASTER * dense)
    text = f"{best} takes {dense / seconds:.1f} times less than dense gradients"
    if mildest != best:
        text += f"; {mildest}, which changes the training less, {dense / priced[mildest].seconds():.1f} times"
    return text + ". Communication that backward would hide is counted in full."


def _rate_text(bytes_per_second: float) -> str:
    if math.isnan(bytes_per_second):
        return ""
    if bytes_per_second in (0.0, math.inf):
        return "never" if bytes_per_second == 0.0 else "always"
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
