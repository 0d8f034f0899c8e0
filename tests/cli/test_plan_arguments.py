"""Numbers that ``pycomm plan`` takes, as people write them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from pycomm.tools.cli.plan import arguments


@pytest.mark.parametrize(
    ("parse", "text", "wanted"),
    [
        (arguments.rate, "1e12", 1e12),
        (arguments.rate, "1.5E+3", 1500.0),
        (arguments.rate, "19.5T", 19.5e12),
        (arguments.rate, " 300 G ", 3e11),
        (arguments.rate, "2.", 2.0),
        (arguments.size, "1e6", 1e6),
        (arguments.size, "100MB", 1e8),
        (arguments.size, "64KiB", 65536.0),
        (arguments.size, ".5k", 500.0),
        (arguments.seconds, "5e-2", 0.05),
        (arguments.seconds, "50ms", 0.05),
    ],
)
def test_numbers_are_taken_as_people_write_them(parse: Callable[[str], float], text: str, wanted: float) -> None:
    assert parse(text) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("parse", [arguments.rate, arguments.positive_size, arguments.seconds])
@pytest.mark.parametrize("text", ["", "e12", "1e", "1e999", "nan", "inf", "-1", "0", "1e12e3", "0x10", "1_000"])
def test_what_is_no_number_is_refused(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted a"):
        parse(text)
