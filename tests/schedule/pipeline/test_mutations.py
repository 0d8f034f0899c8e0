"""Every mutation is wrong, and refused."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm.schedule import pipeline
from pycomm.schedule.pipeline import Pipeline, ScheduleError
from tests.schedule.pipeline.mutations import mutations
from tests.schedule.pipeline.reference import is_right
from tests.schedule.pipeline.tables import TABLES


@settings(max_examples=60, deadline=None)
@given(TABLES, st.integers(0, 2**32))
def test_all_are_wrong_and_refused(table: Pipeline, seed: int) -> None:
    mutants = mutations(table, 16, seed=seed)
    assert len(mutants) == 16
    for mutant in mutants:
        assert not is_right(mutant), mutant.name
        with pytest.raises(ScheduleError):
            pipeline.verify(mutant)
    assert is_right(table)


KINDS = {
    "drop": ", without ",
    "duplicate": " twice$",
    "swap": " swapped$",
    "deadlock": " is done$",
    "rank": " on rank ",
    "stage": " done to stage ",
    "microbatch": " done to microbatch ",
    "kind": " as ",
}


@pytest.mark.parametrize("name", pipeline.names())
def test_kinds_take_turns(name: str) -> None:
    mutants = mutations(pipeline.by_name(name, 3, 6), 24, seed=5)
    kinds = Counter(kind for mutant in mutants for kind, word in KINDS.items() if re.search(word, mutant.name))
    assert kinds == dict.fromkeys(KINDS, 3)


@pytest.mark.parametrize("name", pipeline.names())
def test_late_forwards_are_deadlocks(name: str) -> None:
    """And nothing else is wrong with them."""
    late = [m for m in mutations(pipeline.by_name(name, 3, 6), 40) if m.name.endswith("is done")]
    assert len(late) == 5
    for mutant in late:
        with pytest.raises(ScheduleError, match="^deadlock: rank . waits for rank . to send "):
            pipeline.verify(mutant)


@pytest.mark.parametrize("name", pipeline.names())
def test_the_action_is_named(name: str) -> None:
    for mutant in mutations(pipeline.by_name(name, 3, 6), 40, seed=1):
        with pytest.raises(ScheduleError) as caught:
            pipeline.verify(mutant)
        assert re.search(r"(forward|backward|gradient) \d of stage \d", str(caught.value))
        if match := re.search("without (.*)$", mutant.name):
            assert f"{match[1]} is missing: rank " in str(caught.value)
        if match := re.search("with (.*) twice$", mutant.name):
            assert f"({match[1]}): done a second time" in str(caught.value)


def test_the_smallest_table() -> None:
    """One rank with one microbatch has no room for deadlocks; the others take their turns."""
    mutants = mutations(pipeline.gpipe(1, 1), 30, seed=2)
    assert len(mutants) == 30
    assert not any(map(is_right, mutants))


def test_the_seed_decides() -> None:
    def tables(seed: int) -> list[Any]:
        found = mutations(pipeline.zero_bubble_v(2, 3), 20, seed=seed)
        return [(m.name, *(c.tolist() for c in (m.rank, m.time, m.stage, m.kind, m.microbatch))) for m in found]

    assert tables(1) == tables(1)
    assert tables(1) != tables(2)


def test_times_of_any_kind_leave_room() -> None:
    """A table whose times lie far apart, or next to the largest there is."""
    table = pipeline.from_csv("0F0,0F1,0B0,0B1")
    table.time[:] = np.array([-(2**63), 5, 6, 2**63 - 1])
    assert not any(map(is_right, mutations(table, 40)))


def test_wrong_tables_have_none() -> None:
    with pytest.raises(ScheduleError):
        mutations(mutations(pipeline.gpipe(2, 2), 1)[0], 3)


@pytest.mark.parametrize("name", ["count", "seed"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True])
def test_numbers_that_are_none(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is .*, wanted a whole number of at least 0"):
        mutations(pipeline.gpipe(2, 2), **{"count": 1, "seed": 0, name: value})


def test_none_are_none() -> None:
    assert mutations(pipeline.gpipe(2, 2), 0) == []
