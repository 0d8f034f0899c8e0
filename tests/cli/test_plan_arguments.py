"""Numbers that ``pycomm plan`` takes, as people write them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from pycomm.tools.cli.plan import command


@pytest.mark.parametrize(
    ("parse", "text", "wanted"),
    [
        (command.rate, "1e12", 1e12),
        (command.rate, "1.5E+3", 1500.0),
        (command.rate, "19.5T", 19.5e12),
        (command.rate, " 300 G ", 3e11),
        (command.rate, "2.", 2.0),
        (command.size, "1e6", 1e6),
        (command.size, "100MB", 1e8),
        (command.size, "64KiB", 65536.0),
        (command.size, ".5k", 500.0),
        (command.seconds, "5e-2", 0.05),
        (command.seconds, "50ms", 0.05),
    ],
)
def test_numbers_are_taken_as_people_write_them(parse: Callable[[str], float], text: str, wanted: float) -> None:
    assert parse(text) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("parse", [command.rate, command.positive_size, command.seconds])
@pytest.mark.parametrize("text", ["", "e12", "1e", "1e999", "nan", "inf", "-1", "0", "1e12e3", "0x10", "1_000"])
def test_what_is_no_number_is_refused(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted a"):
        parse(text)
