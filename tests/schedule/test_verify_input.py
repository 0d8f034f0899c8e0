"""verify takes anything that has num_ranks, num_chunks and rounds(), and raises nothing but ScheduleError."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import schedule


def verdict(s: Any) -> str | None:
    """Return what is wrong; any other exception fails the test."""
    try:
        schedule.verify(s)
    except schedule.ScheduleError as error:
        return str(error)
    return None


def right_round() -> tuple[Any, ...]:
    return ((0, 1), (1, 0), (0, 0), (1, 1), (1, 1))


ROUNDS = [
    *(lambda: [right_round()], lambda: (right_round(),), lambda: iter([right_round()]), lambda: [[*right_round()]]),
    *(lambda: [iter(right_round())], lambda: [np.array(right_round())], lambda: {right_round(): 1}.keys()),
    lambda: [tuple(np.array(c, t) for c, t in zip(right_round(), ("i1", "u1", "i4", "u4", ">i8"), strict=True))],
    lambda: [([],) * 5, right_round(), (np.empty(0),) * 5, itertools.repeat([], 5)],
]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_rounds_of_any_kind(rounds: Callable[[], Any]) -> None:
    schedule.verify(SimpleNamespace(num_ranks=2, num_chunks=1, rounds=rounds))
    schedule.verify(SimpleNamespace(num_ranks=2.0, num_chunks=np.int8(1), rounds=rounds), exact=False)


def failing(error: BaseException) -> Iterator[Any]:
    yield right_round()
    raise error


NO_SIZE = [
    *(None, "x", "2", b"2", 1.5, 0, -1, math.nan, math.inf, 1j, [2], np.array([2, 3]), object(), 2**45, 2**62, 2**70),
]
NO_ROUNDS: list[Any] = [
    *(None, 5, "x", [], lambda: 5, lambda: None, lambda: [None], lambda: [5], lambda: ["abcde"], lambda: [[]]),
    *(
        lambda one: [],
        lambda: 1 / 0,
        lambda: failing(KeyError(1)),
        lambda: failing(ValueError()),
        lambda: next(iter(())),
    ),
    *(lambda: [right_round()[:4]], lambda: [(*right_round(), [0, 0])], lambda: [right_round(), right_round(), None]),
    *(
        lambda: {1: 2},
        lambda: [{n: n for n in "abcde"}],
        lambda: [np.zeros((5, 2))],
        lambda: [np.zeros((5, 1, 1), int)],
    ),
]
NO_COLUMN: list[Any] = [
    *([0], [0, 1, 0], [0.0, 1.0], [0, 0.5], [math.nan, 0], ["0", "1"], [None, None], None, 0, "01", {}, [[0, 1]]),
    *([True, False], [0, 2**63], [0, 2**64], [0, 2**200], [0, -(2**63)], [0, 2**63 - 1], [-1, 0], [7, 7], [0, 1j]),
    *(np.array([0, 1], object), np.array([0, 1], np.uint64), np.array([0, 1], float), np.array([[0, 1]]), np.array(0)),
    *(
        iter([0, 1]),
        range,
        [[], [0]],
        np.array([0, 1], "m8[s]"),
        np.array(["0", "1"]),
        np.zeros(2, "i4,i4"),
        [[0], [1]],
    ),
]


@pytest.mark.parametrize("size", NO_SIZE)
def test_sizes_that_are_none(size: Any) -> None:
    for sizes in ({"num_ranks": size, "num_chunks": 1}, {"num_ranks": 2, "num_chunks": size}):
        message = verdict(SimpleNamespace(**sizes, rounds=lambda: [right_round()]))
        assert message is not None
        assert "num_ranks" in message or "num_chunks" in message
    assert "num_ranks" in str(verdict(SimpleNamespace(num_chunks=1, rounds=list)))
    assert "num_chunks" in str(verdict(SimpleNamespace(num_ranks=2, rounds=list)))


@pytest.mark.parametrize("rounds", NO_ROUNDS)
def test_rounds_that_are_none(rounds: Any) -> None:
    assert verdict(SimpleNamespace(num_ranks=2, num_chunks=1, rounds=rounds)) is not None
    assert "rounds" in str(verdict(SimpleNamespace(num_ranks=2, num_chunks=1)))


@pytest.mark.parametrize("column", NO_COLUMN)
def test_columns_that_are_none(column: Any) -> None:
    for field in range(5):
        bad = (*right_round()[:field], column, *right_round()[field + 1 :])
        message = verdict(SimpleNamespace(num_ranks=2, num_chunks=1, rounds=lambda bad=bad: [right_round(), bad]))
        assert message is not None
        assert message.startswith(("round 1", "after the last round"))


@pytest.mark.parametrize("claim", [{"goal": 5}, {"goal": "x"}, {"goal": []}, {"goal": np.array([1, 2])}], ids=repr)
def test_goals_that_are_none(claim: dict[str, Any]) -> None:
    assert "goal" in str(verdict(SimpleNamespace(num_ranks=2, num_chunks=1, rounds=list, **claim)))


@pytest.mark.parametrize("owners", [None, 0, [0], [0, 2], [0, -1], [0, 0.5], [0, 0, 0], "01", [[0, 1]]], ids=repr)
def test_owners_that_are_none(owners: Any) -> None:
    for goal in ("reduce_scatter", "all_gather"):
        claim = {"goal": goal, "owners": owners}
        assert "owners" in str(verdict(SimpleNamespace(num_ranks=2, num_chunks=2, rounds=list, **claim)))


def test_attributes_that_cannot_be_read() -> None:
    class Unreadable:
        num_ranks, num_chunks, rounds = 1, 1, list

        @property
        def goal(self) -> str:
            raise RuntimeError("not today")

    assert "not today" in str(verdict(Unreadable()))


ANYTHING = st.one_of(st.integers(-2, 3), st.integers(), st.floats(), st.text(max_size=2), st.none(), st.booleans())


COLUMN = st.one_of(st.lists(st.integers(0, 1), max_size=2), st.lists(ANYTHING, max_size=2))


@given(st.lists(st.lists(COLUMN, max_size=6)))
def test_nothing_but_schedule_errors(rounds: Any) -> None:
    verdict(SimpleNamespace(num_ranks=2, num_chunks=1, rounds=lambda: rounds))
