"""Argument types of ``pycomm plan``, and its older form, in which today's commands were options."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from functools import partial

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
