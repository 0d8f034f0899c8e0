"""``pycomm plan``: its commands and their arguments."""

from __future__ import annotations

import argparse
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

from pycomm.collectives.transport import TRANSPORTS
from pycomm.tools.cli.arguments import Parser, Run, complain, integer, later

_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)"  # 12, 1.5, .5, 1e12
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_DTYPES = ("fp32", "bf16", "fp16")


def size(text: str) -> float:
    """Parse a number of bytes: 100MB, 64KiB, 10 G."""
    match = re.fullmatch(_NUMBER + r"\s*([kmg]i?)?(b?)", text.strip().lower())
    value = math.inf if match is None else float(match[1]) * _UNITS[match[2] or ""]
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a size such as 100MB or 64KiB")
    if match is not None and match[3] and not match[2]:
        raise argparse.ArgumentTypeError(
            f"{text!r} are {value:g} bytes, wanted a size such as 100MB; for a model with as many billion parameters: "
            f"pycomm plan compression --parameters {text.strip()}"
        )
    return value


def number(text: str) -> float:
    """Parse a number of parameters above 0: 7B, 125M, 1.5e9."""
    match = re.fullmatch(_NUMBER + r"\s*([kmbt])?", text.strip().lower())
    value = 0.0 if match is None else float(match[1]) * _COUNTS[match[2] or ""]
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a number of parameters such as 125M or 7B")
    return value


def positive_size(text: str) -> float:
    """Parse a number of bytes above 0."""
    value = size(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a size above 0, such as 10GB")
    return value


def sizes(text: str) -> tuple[float, ...]:
    """Parse numbers of bytes above 0, separated by commas."""
    return tuple(positive_size(word) for word in text.split(","))


_RANKS = """\
Simulates every all-reduce algorithm on a described network. Prints their ranking for one size, and the fastest for each
range of sizes. Nothing is sent.
"""
_COMPRESSION = """\
Says whether compressing gradients pays. Measures each method's cost on this machine, simulates the network, and prints
the bandwidth below which the method is faster than uncompressed gradients, the optimizers that it can be used with, and
its memory.
"""
_CALIBRATE = """\
Measures the cost of messages and the time of each algorithm, between the ranks that torchrun started or between --ranks
processes of this host. Writes a file for --network, Communicator(network=...) and the environment variable
PYCOMM_NETWORK.
"""
_LAYERS = """\
Places layers of given sizes on devices: all layers on each (data parallelism), whole layers on different devices
(inter-operator), each layer split over devices (intra-operator), or both.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("plan", help="estimate time and memory: algorithms, compression, layouts of layers")
    add = partial(_add, parser.add_subparsers(dest="plan", required=True, metavar="WHAT"))
    ranks = add("ranks", "rank all-reduce algorithms on a network", _RANKS)
    compression = add("compression", "whether compressing gradients pays on a network", _COMPRESSION, whole=True)
    calibrate = add("calibrate", "measure a network, for the other commands", _CALIBRATE)
    layers = add("layers", "place layers of given sizes on devices", _LAYERS)
    for priced in (ranks, compression):
        option = priced.add_argument
        option("--ranks", type=integer(1), required=True, help="number of ranks")
        given = option if priced is ranks else priced.add_mutually_exclusive_group().add_argument
        given("--bytes", type=size, default=100e6, metavar="SIZE", help="of the gradients: 64KiB, ...; default 100MB")
        if priced is compression:
            given("--parameters", type=number, metavar="N", help="of the model, in place of --bytes: 125M, 7B, ...")
            option("--dtype", choices=_DTYPES, default="fp32", help="of the gradients (default fp32)")
        option("--network", help="a name or a file, see below")
        option("--per-host", type=integer(1), help="ranks on each host (default: as the network says)")
        priced.epilog_later = _networks
    option = calibrate.add_argument
    option("--ranks", type=integer(1), help="processes to start (default: torchrun's)")
    option("--transport", choices=TRANSPORTS, default="auto", help="transport of messages (default auto)")
    option("--output", type=Path, default=Path("network.json"), metavar="FILE", help="file (default network.json)")
    option("--force", action="store_true", help="replace an existing file")
    option = layers.add_argument
    option("sizes", type=sizes, metavar="SIZES", help="bytes of the layers, such as 16GB,2GB")
    option("--devices", type=integer(1), required=True, help="number of devices")
    option("--memory", type=positive_size, required=True, metavar="SIZE", help="memory of each device, such as 80GB")


def _add(plans: Any, name: str, summary: str, description: str, *, whole: bool = False) -> Parser:
    parser: Parser = plans.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.siblings = plans.choices
    parser.set_defaults(run=_without_traceback(later(f"pycomm.tools.cli.plan.{name}", whole=whole)), parser=parser)
    return parser


def _without_traceback(run: Run) -> Run:
    """Return ``run`` with errors about files and arguments printed as one line, and exit code 2."""

    def call(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            complain(f"pycomm plan: {error}")
            return 2

    return call


def _networks() -> str:
    from pycomm.schedule.network import DEFAULT_NETWORK, NETWORKS  # takes numpy

    names = ", ".join(f"{name} (default)" if name == DEFAULT_NETWORK else name for name in NETWORKS)
    return f"Networks: {names}; or a file that `pycomm plan calibrate` wrote."
