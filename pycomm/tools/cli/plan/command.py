"""``pycomm plan``: its commands and their arguments, also in the older form, in which today's commands were options."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pycomm.collectives.transport import TRANSPORTS
from pycomm.tools.cli.arguments import Parser, Run, complain, integer, later

_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)"  # 12, 1.5, .5, 1e12
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}

_FLAGS = ("compression", "calibrate", "scaling")
_WITH_VALUE = ("layers", "model")
_DRAWN = ("ranks", "scaling")
_PLOT = "pycomm_plan.png"


def size(text: str) -> float:
    """Parse a number of bytes: 100MB, 64KiB, 10 G."""
    match = re.fullmatch(_NUMBER + r"\s*([kmg]i?)?b?", text.strip().lower())
    value = math.inf if match is None else float(match[1]) * _UNITS[match[2] or ""]
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a size such as 100MB or 64KiB")
    return value


def positive_size(text: str) -> float:
    """Parse a number of bytes above 0."""
    value = size(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a size above 0, such as 10GB")
    return value


def sizes(text: str) -> tuple[float, ...]:
    """Parse numbers of bytes above 0, separated by commas."""
    return tuple(positive_size(word) for word in text.split(","))


def seconds(text: str) -> float:
    """Parse a time above 0: 0.05, 50ms, 50us."""
    match = re.fullmatch(_NUMBER + r"\s*(s|ms|us)?", text.strip().lower())
    value = 0.0 if match is None else float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[match[2] or "s"]
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a time above 0, such as 50ms")
    return value


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a number from 0 to 1")
    return value


def rate(text: str) -> float:
    """Parse a rate above 0: 19.5T, 300G, 1e12."""
    match = re.fullmatch(_NUMBER + r"\s*([kmgtp]?)", text.strip().lower())
    value = 0.0 if match is None else float(match[1]) * 1000.0 ** "_kmgtp".index(match[2] or "_")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted a number above 0, such as 19.5T")
    return value


def modernized(words: Sequence[str]) -> list[str]:
    """Return the arguments of ``pycomm plan`` with the command first.

    The older form had ``--layers SIZES`` for ``layers SIZES``; no such option meant ``ranks``. It drew a plot,
    replacing an older one, unless ``--no-plot`` was given.
    """
    if not words or not words[0].startswith("-") or words[0] in ("-h", "--help"):
        return list(words)
    parser = argparse.ArgumentParser(prog="pycomm plan", usage="%(prog)s WHAT ...", add_help=False)
    modes = parser.add_mutually_exclusive_group()
    for name in _FLAGS:
        modes.add_argument(f"--{name}", dest="mode", action="store_const", const=[name])
    for name in _WITH_VALUE:
        modes.add_argument(f"--{name}", dest="mode", type=partial(_command, name))
    parser.add_argument("--plot")
    parser.add_argument("--no-plot", action="store_true")
    known, rest = parser.parse_known_args(words)
    command, *values = known.mode or ["ranks"]
    plot: list[str] = []
    if command in _DRAWN and not known.no_plot:
        plot = ["--plot", known.plot] if known.plot else ["--plot", _PLOT, "--force"]
    return [command, *plot, *rest, *(["--", *values] if values else [])]


def _command(name: str, value: str) -> list[str]:
    return [name, value]


_RANKS = """\
Simulates every all-reduce algorithm on a described network. Prints their ranking for one size, and the fastest for each
range of sizes. --plot draws time against size. Nothing is sent.
"""
_COMPRESSION = """\
Says whether compressing gradients pays. Measures each method's cost on this machine, simulates the network, and prints
the bandwidth below which the method is faster than uncompressed gradients.
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
_MODEL = """\
Plans how to train a model on several devices. Estimates memory and time of splitting its layers, of pipeline stages and
of replicas. FILE.py has a FUNCTION that returns the model, make_batch(samples) that returns its arguments (or give
--input), and optionally loss(output). The model is traced without allocating memory.
"""
_SCALING = """\
Predicts throughput and efficiency of many devices. Fits T = S N e to measured --points, in the forms of Amdahl,
Gustafson and others: T is the throughput of N devices, S that of one, e the efficiency. Or predicts e from --step, the
time that one device computes, and the network.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("plan", help="estimate time and memory: algorithms, compression, splits of a model")
    parser.modernized = modernized
    plans = parser.add_subparsers(dest="plan", required=True, metavar="WHAT")
    add = partial(_add, plans)
    _add_ranks(add("ranks", "rank all-reduce algorithms on a network", _RANKS))
    _add_compression(add("compression", "whether compressing gradients pays on a network", _COMPRESSION, whole=True))
    _add_calibrate(add("calibrate", "measure a network, for the other commands", _CALIBRATE))
    _add_layers(add("layers", "place layers of given sizes on devices", _LAYERS, whole=True))
    _add_model(add("model", "plan how to train a model on several devices", _MODEL, whole=True))
    _add_scaling(add("scaling", "throughput and efficiency of up to 4096 devices", _SCALING, whole=True))


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


def _add_ranks(parser: Parser) -> None:
    add = parser.add_argument
    add("--ranks", type=integer(1), required=True, help="number of ranks")
    _add_bytes(add)
    _add_network(parser)
    _add_plot(parser)


def _add_compression(parser: Parser) -> None:
    add = parser.add_argument
    add("--ranks", type=integer(1), required=True, help="number of ranks")
    _add_bytes(add)
    _add_network(parser)


def _add_calibrate(parser: Parser) -> None:
    add = parser.add_argument
    add("--ranks", type=integer(1), help="processes to start (default: those of torchrun)")
    add("--transport", choices=TRANSPORTS, default="auto", help="transport of messages (default auto)")
    add("--output", type=Path, default=Path("network.json"), metavar="FILE", help="file (default network.json)")
    _add_force(add)


def _add_layers(parser: Parser) -> None:
    add = parser.add_argument
    add("sizes", type=sizes, metavar="SIZES", help="bytes of the layers, such as 16GB,2GB")
    _add_devices(add)


def _add_model(parser: Parser) -> None:
    add = parser.add_argument
    add("model", metavar="FILE.py:FUNCTION", help="function that returns the model")
    add("--batch", type=integer(1), required=True, help="samples of a step, over all devices")
    _add_devices(add)
    add(
        "--input", metavar="SHAPES", help="of one sample, such as 3x224x224 or 512:int64 (default: make_batch(samples))"
    )
    add("--optimizer", default="adam", help="sgd, momentum, adam, ... (default adam)")
    add("--flops", type=rate, help="FLOPs per second of a device, such as 19.5T (default: measured here)")
    add("--memory-bandwidth", type=rate, help="bytes per second of its memory, such as 900G, with --flops")
    add("--cores", type=integer(1), help="devices that can compute at once, if they share the cores of one host")
    add("--overlap", type=share, default=0.0, help="share of communication hidden by computation, 0 to 1 (default 0)")
    add("--write", type=Path, metavar="FILE", help="write the best plan to FILE, for split()")
    _add_force(add)
    _add_network(parser)


def _add_scaling(parser: Parser) -> None:
    add = parser.add_argument
    add("--points", help="measured throughputs by devices, 1:100,2:190, or a file [[1, 100], [2, 190]]")
    add("--step", type=seconds, help="computation of one device in a step, such as 50ms")
    add("--overlap", type=share, default=0.0, help="share of communication hidden by computation, 0 to 1 (default 0)")
    add("--devices", type=integer(1), help="the most devices to show (default 4096)")
    _add_bytes(add)
    _add_network(parser)
    _add_plot(parser)


def _add_bytes(add: Callable[..., Any]) -> None:
    add("--bytes", type=size, default=100e6, metavar="SIZE", help="size of the gradients, such as 64KiB; default 100MB")


def _add_devices(add: Callable[..., Any]) -> None:
    add("--devices", type=integer(1), required=True, help="number of devices")
    add("--memory", type=positive_size, required=True, metavar="SIZE", help="memory of each device, such as 80GB")


def _add_network(parser: Parser) -> None:
    parser.add_argument("--network", help="a name or a file, see below")
    parser.add_argument("--per-host", type=integer(1), help="ranks on each host (default: as the network says)")
    parser.epilog_later = _networks


def _networks() -> str:
    from pycomm.schedule.network import DEFAULT_NETWORK, NETWORKS  # takes numpy

    names = ", ".join(f"{name} (default)" if name == DEFAULT_NETWORK else name for name in NETWORKS)
    return f"Networks: {names}; or a file that `pycomm plan calibrate` wrote."


def _add_plot(parser: Parser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a plot, as a PNG")
    _add_force(parser.add_argument)


def _add_force(add: Callable[..., Any]) -> None:
    add("--force", action="store_true", help="replace an existing file")
