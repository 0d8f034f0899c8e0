"""Older forms of ``pycomm plan``, which go on working: what is a command now was an option then."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

_FLAGS = ("compression", "calibrate", "scaling")
_WITH_VALUE = ("layers", "model")
_DRAWN = ("ranks", "scaling")
_PLOT = "pycomm_plan.png"


def in_todays_form(words: Sequence[str]) -> list[str]:
    """Return the arguments of ``pycomm plan`` with the command first.

    ``--layers SIZES`` was what ``layers SIZES`` is, and no such option meant ``ranks``. A plot was drawn, anew each
    time, unless there was ``--no-plot``.
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
