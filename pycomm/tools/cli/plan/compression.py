"""``pycomm plan compression``: whether compressing gradients pays."""

from __future__ import annotations

import argparse
import math

import torch

from pycomm.compression import Compression
from pycomm.descriptions import size_text
from pycomm.errors import attempt
from pycomm.tools.cli.plan.report import network_of, time_text
from pycomm.tools.cli.table import print_table
from pycomm.tools.cli.timing import busy_note, rate_text
from pycomm.training.cost.planning import METHODS, Priced, price
from pycomm.training.cost.pricing import CLEARLY_FASTER
from pycomm.untrusted import one_line

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(arguments: argparse.Namespace) -> int:
    """Print the cost of every method, what it needs, and whether one pays; return the exit code."""
    num_ranks, network, dtype = arguments.ranks, network_of(arguments), _DTYPES[arguments.dtype]
    nbytes = arguments.bytes if arguments.parameters is None else arguments.parameters * dtype.itemsize
    busy = busy_note(torch.get_num_threads())
    priced = price(num_ranks, nbytes, network, dtype)
    dense = priced["dense"].seconds()
    of_what = size_text(nbytes) + (f" in {arguments.dtype}" if dtype != torch.float32 else "")
    print(f"gradients of {of_what}, {num_ranks} ranks, network {one_line(network.name)}")
    print("work measured on this machine, communication simulated, without overlap of the two")
    print(f"{busy}\n" if busy else "")
    header = ["method", "sent", "work", "least - most", "link", "together", "x dense", "pays below"]
    rows = [
        [
            name,
            size_text(each.sent_bytes),
            time_text(each.local),
            f"{time_text(each.low)} - {time_text(each.high)}",
            time_text(each.link),
            time_text(each.seconds()),
            f"{dense / each.seconds():.2f}",
            _break_even_text(each.break_even),
        ]
        for name, each in priced.items()
    ]
    print_table(header, rows, indent="  ")
    print()
    needs = {name: (optimizer_of(method), state_bytes(method)) for name, method in METHODS.items()}
    count = nbytes / dtype.itemsize
    rows = [
        [name, optimizer, f"{state} bytes", size_text(state * count), size_text(state * count + nbytes)]
        for name, (optimizer, state) in needs.items()
    ]
    print_table(["method", "optimizer", "state per parameter", "per rank", "with gradients"], rows, indent="  ")
    print(f"\n{verdict(priced)}")
    return 0


def optimizer_of(method: Compression) -> str:
    """Return which optimizers ``method`` can be used with, according to its own check."""
    params = [torch.nn.Parameter(torch.zeros(2, 2))]

    def suits(optimizer: torch.optim.Optimizer) -> bool:
        return not isinstance(attempt(lambda: method.check(optimizer)), Exception)

    if not suits(torch.optim.AdamW(params)):
        return "SGD, momentum=0"
    return "any" if suits(torch.optim.SGD(params, 0.1, momentum=0.9)) else "without momentum"


def state_bytes(method: Compression) -> int:
    """Return the bytes that ``method`` keeps for each parameter: a residual, and two velocities with momentum."""
    return (12 if getattr(method, "momentum", 0.0) else 4) if method.transactional else 0


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


def _break_even_text(bytes_per_second: float) -> str:
    if math.isnan(bytes_per_second):
        return ""
    if bytes_per_second in (0.0, math.inf):
        return "never" if bytes_per_second == 0.0 else "always"
    return rate_text(bytes_per_second)
