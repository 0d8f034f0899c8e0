"""How much of an operation each rank does, and how arrays are staged: decisions, of figures that are made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

import pycomm._native as _native

LARGE = 64 << 20
BYTES_PER_SECOND = 12e9


def sizes_of(slacks: list[float], num_bytes: int = LARGE, count: int = 16 << 20) -> list[int]:
    shares = _native.shares_of(slacks, num_bytes, count)
    assert shares[0][0] == 0
    assert shares[-1][1] == count
    assert all(left[1] == right[0] for left, right in itertools.pairwise(shares))
    assert all(begin % 64 == 0 for begin, _ in shares)
    return [end - begin for begin, end in shares]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_that_wait_equally_long_do_equally_much(size: int) -> None:
    sizes = sizes_of([1e-3] * size)
    assert max(sizes) - min(sizes) <= 64 * size


def test_shares_are_equal_where_nobody_knows_or_it_does_not_matter() -> None:
    for slacks, num_bytes in (([-1.0, 5e-3], LARGE), ([5e-3, -1.0, 0.0], LARGE), ([0.0, 5e-3], 512 << 10)):
        sizes = sizes_of(slacks, num_bytes)
        assert max(sizes) - min(sizes) <= 64 * len(slacks)


def test_who_waits_longer_does_as_much_more_as_levels_both() -> None:
    work = 2 * 2 * LARGE / BYTES_PER_SECOND  # seconds, of both
    late, waits = sizes_of([0.0, work / 4])
    assert late / (late + waits) == pytest.approx(3 / 8, abs=0.01)
    assert waits / (late + waits) == pytest.approx(5 / 8, abs=0.01)


def test_who_is_very_late_does_nothing() -> None:
    assert sizes_of([1.0, 0.0, 1.0])[1] == 0
    assert sizes_of([0.0, 10.0]) == [0, 16 << 20]


def observe(choice: _native.StagingChoice, seconds_of: Callable[[int], float], times: int, num_bytes: int) -> list[int]:
    """Let ``choice`` see that many operations, which take what ``seconds_of`` says of a way; return the ways."""
    ways = []
    for _ in range(times):
        ways.append(choice.next())
        choice.observe(num_bytes, seconds_of(ways[-1]) * num_bytes)
    return ways


@pytest.mark.parametrize("best", [0, 1, 2, 3])
def test_the_fastest_way_of_staging_is_found_and_kept(best: int) -> None:
    choice = _native.StagingChoice()

    def seconds_of(way: int) -> float:
        return 1.0 if way == best else 1.2

    observe(choice, seconds_of, 200, LARGE)
    later = observe(choice, seconds_of, 400, LARGE)
    assert later.count(best) > 0.85 * len(later), "all but a few trials"
    assert len(set(later)) > 1, "others are tried now and then"


def test_another_way_takes_over_when_the_machine_changes() -> None:
    choice = _native.StagingChoice()
    observe(choice, lambda way: 1.0 if way == 2 else 1.2, 200, LARGE)
    ways = observe(choice, lambda way: 1.0 if way == 1 else 1.2, 1000, LARGE)
    assert ways[-200:].count(1) > 170


def test_a_way_that_is_hardly_better_or_not_always_is_not_taken() -> None:
    choice = _native.StagingChoice()
    ways = observe(choice, lambda way: 1.0 if way == 0 else 0.99, 400, LARGE)
    assert ways.count(0) > 320
    choice, turns = _native.StagingChoice(), itertools.count()
    ways = observe(choice, lambda way: 1.0 if way == 0 else (0.8 if next(turns) % 3 else 1.5), 400, LARGE)
    assert ways[-100:].count(0) > 80


def test_small_operations_tell_nothing() -> None:
    choice = _native.StagingChoice()
    first = choice.next()
    assert set(observe(choice, lambda way: 1.0 if way == 3 else 2.0, 500, 1 << 20)) == {first}
