"""Numbers that ``pycomm plan`` takes, as people write them."""

from __future__ import annotations

import argparse

import pytest

from pycomm.tools.cli.plan import command


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1e6", 1e6),
        ("1.5E+3", 1500.0),
        (" 300 G ", 3e11),
        ("2.", 2.0),
        ("100MB", 1e8),
        ("64KiB", 65536.0),
        (".5k", 500.0),
    ],
)
def test_numbers_are_taken_as_people_write_them(text: str, wanted: float) -> None:
    assert command.size(text) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("text", "wanted"), [("7B", 7e9), ("125m", 1.25e8), ("1.5e9", 1.5e9), (" 70 k ", 7e4), ("1T", 1e12)]
)
def test_numbers_of_parameters(text: str, wanted: float) -> None:
    assert command.number(text) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("text", ["", "e12", "1e", "1e999", "nan", "inf", "-1", "0", "1e12e3", "0x10", "1_000"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="wanted a"):
        command.positive_size(text)
