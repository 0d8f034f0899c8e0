"""verify, and all else that takes a table, raise nothing but ScheduleError, whatever they are given."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm.schedule import pipeline
from tests.schedule.pipeline.mutations import mutations

RIGHT: dict[str, Any] = {
    "num_ranks": 2,
    "num_stages": 2,
    "num_microbatches": 1,
    "rank_of_stage": [0, 1],
    "rank": [0, 0, 1, 1],
    "time": [0, 3, 1, 2],
    "stage": [0, 0, 1, 1],
    "kind": [0, 1, 0, 1],
    "microbatch": [0, 0, 0, 0],
    "splits_weights": False,
}
SIZES = ("num_ranks", "num_stages", "num_microbatches")
COLUMNS = ("rank_of_stage", "rank", "time", "stage", "kind", "microbatch")
TAKERS: dict[str, Callable[[Any], Any]] = {
    "verify": pipeline.verify,
    "simulate": lambda table: pipeline.simulate(table, 1, 1),
    "mutations": lambda table: mutations(table, 1),
    "to_csv": pipeline.to_csv,
    "picture": pipeline.picture,
}


def with_(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**RIGHT, **changes})


def refusals(table: Any) -> list[str]:
    """Return what all that take a table say; any other exception, or none, fails the test."""
    messages = []
    for take in TAKERS.values():
        with pytest.raises(pipeline.ScheduleError) as caught:
            take(table)
        messages.append(str(caught.value))
    return messages


def test_anything_with_the_attributes_will_do() -> None:
    kinds = ("i1", "u1", "i4", "u4", ">i8", "i8")
    strange = {name: np.array(RIGHT[name], kind) for name, kind in zip(COLUMNS, kinds, strict=True)}
    for table in (with_(), with_(**strange), with_(num_ranks=2.0, num_stages=np.int8(2), splits_weights=np.False_)):
        assert pipeline.verify(table).num_messages == 2
        assert pipeline.simulate(table, 1, 2).seconds == 6
        assert len(mutations(table, 8)) == 8
        assert pipeline.to_csv(table) == "0F0,,,0B0\n,1F0,1B0,\n"
        assert pipeline.picture(table).splitlines()[2:] == ["rank 0 F0 .  .  B0", "rank 1 .  F0 B0 ."]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "size", [None, "x", "2", 1.5, 0, -1, math.nan, math.inf, 1j, [2], np.array([2, 3]), object(), 2**62, 2**70]
)
def test_sizes_that_are_none(name: str, size: Any) -> None:
    if isinstance(size, int) and name == "num_microbatches" and size > 0:
        with pytest.raises(pipeline.ScheduleError, match="is missing"):
            pipeline.verify(with_(num_microbatches=size))
    else:
        named = (name, "rank_of_stage")  # which does not have so many stages
        assert all(message.startswith(named) for message in refusals(with_(**{name: size})))


NO_COLUMN: list[Any] = [
    *(
        [0],
        [0, 1, 0, 0, 1],
        [0.0, 1.0, 0.0, 0.0],
        [math.nan] * 4,
        ["0"] * 4,
        [None] * 4,
        None,
        0,
        "0101",
        {},
        [[0, 1]] * 2,
    ),
    *(
        [True, False] * 2,
        [0, 2**63, 0, 0],
        [0, 2**200, 0, 0],
        [0, 1j, 0, 0],
        object(),
        range,
        np.array(0),
        [[0, 1]] * 2,
    ),
    *(np.zeros(4, object), np.zeros(4, np.uint64), np.zeros(4, float), np.zeros((4, 1), int), np.zeros(4, "m8[s]")),
]


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("column", NO_COLUMN, ids=range(len(NO_COLUMN)))
def test_columns_that_are_none(name: str, column: Any) -> None:
    assert all(name in message or "lengths" in message for message in refusals(with_(**{name: column})))


@pytest.mark.parametrize("name", ["rank", "stage", "kind", "microbatch"])
@pytest.mark.parametrize("value", [-1, 9, 2**62, -(2**63)])
def test_numbers_out_of_range(name: str, value: int) -> None:
    column = [*RIGHT[name][:2], value, RIGHT[name][3]]
    assert all(f"{name} is not in 0 ... " in message for message in refusals(with_(**{name: column})))


@pytest.mark.parametrize("placement", [[0], [0, 2], [-1, 0], [0, 1, 1]])
def test_placements_that_are_none(placement: list[int]) -> None:
    wanted = "wanted one of the 2 ranks for each stage"
    assert all(wanted in message for message in refusals(with_(rank_of_stage=placement)))


@pytest.mark.parametrize("claim", [None, 0, 1, "yes", [True], np.array([True, False])])
def test_claims_that_are_none(claim: Any) -> None:
    assert all("splits_weights is " in message for message in refusals(with_(splits_weights=claim)))


@pytest.mark.parametrize("table", [None, 5, "gpipe", [], object(), {"num_ranks": 1}, SimpleNamespace(), math])
def test_what_is_no_table(table: Any) -> None:
    refusals(table)


@pytest.mark.parametrize("name", RIGHT)
def test_attributes_that_are_not_there(name: str) -> None:
    table = with_()
    delattr(table, name)
    assert all(name in message for message in refusals(table))


def test_attributes_that_cannot_be_read() -> None:
    class Unreadable(SimpleNamespace):
        @property
        def splits_weights(self) -> bool:
            raise RuntimeError("not today")

    table = Unreadable(**{name: value for name, value in RIGHT.items() if name != "splits_weights"})
    assert all("not today" in message for message in refusals(table))


ANYTHING = st.one_of(st.integers(-2, 3), st.integers(), st.floats(), st.text(max_size=2), st.none(), st.booleans())
COLUMN = st.one_of(st.lists(st.integers(0, 1), min_size=4, max_size=4), st.lists(ANYTHING, max_size=4), ANYTHING)


@given(st.dictionaries(st.sampled_from(sorted(RIGHT)), COLUMN, min_size=1))
def test_nothing_but_schedule_errors(changes: dict[str, Any]) -> None:
    for take in TAKERS.values():
        with contextlib.suppress(pipeline.ScheduleError):
            take(with_(**changes))
