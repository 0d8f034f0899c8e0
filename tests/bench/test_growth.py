"""Counts and bytes grow with ranks, parameters, bytes and buckets as docs/growth.md says; seconds are not looked at."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.growth.command import measured
from bench.growth.laws import LAWS, SIMULATED, expected, exponent, off_law
from pycomm import schedule

ROOT = Path(__file__).parents[2]
POINTS = {
    "ranks": [2, 4, 6],
    "parameters": [10, 100, 1000],
    "bytes": [1 << 10, 1 << 15, 1 << 20, 1 << 23],
    "buckets": [1, 4, 16],
}


@pytest.mark.timeout(300)
def test_counts_and_bytes_follow_their_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = measured(POINTS, rounds=2, steps=1)
    assert found.keys() == LAWS.keys()
    for axis, curve in found.items():
        assert not off_law(axis, POINTS[axis], curve), (axis, curve)
        assert set(curve["left"]) == {0}, axis


def test_a_simulated_all_reduce_follows_its_law() -> None:
    ranks = [16, 64, 256]
    for name, laws in SIMULATED.items():
        found = [schedule.by_name(name, size).stats() for size in ranks]
        for cost, values in (("messages", [x.messages for x in found]), ("sent", [x.max_sent for x in found])):
            assert exponent(ranks, values) == pytest.approx(expected(laws[cost], ranks), abs=0.15), (name, cost)


def test_exponents() -> None:
    xs = [1.0, 10.0, 100.0, 1000.0]
    assert exponent(xs, [7.0 + 3.0 * x for x in xs]) == pytest.approx(1.0)
    assert exponent(xs, [7.0 + x**2 for x in xs]) == pytest.approx(2.0, abs=0.05)
    assert exponent(xs, [7.0, 7.1, 7.3, 7.2]) == 0.0
    assert exponent(xs, [9.0, 3.0, 2.0, 1.0]) == 0.0
    assert 0.0 < exponent(xs, [1.0 + math.log(x) for x in xs]) < 0.5


def test_costs_off_their_laws_are_found() -> None:
    ranks = POINTS["ranks"]
    right = {name: [law.shape(x) for x in ranks] for name, law in LAWS["ranks"].items()}
    assert not off_law("ranks", ranks, right)
    wrong = {"requests": [4.0 * x for x in ranks], "descriptors": [1.0 * x**2 for x in ranks], "left": [0.0, 1.0, 6.0]}
    assert set(off_law("ranks", ranks, {**right, **wrong})) == set(wrong)
