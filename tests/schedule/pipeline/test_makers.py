"""Pipelines are what their papers say: idle time, memory, placement; and any sizes are run, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm.schedule import pipeline
from pycomm.schedule.pipeline import BACKWARD, FORWARD, Pipeline
from tests.schedule.pipeline.reference import Step, is_right, needs, programs_of

SECONDS = st.integers(1, 6)


@pytest.mark.parametrize("name", pipeline.names())
@pytest.mark.parametrize("ranks", range(1, 6))
def test_all_small_sizes(name: str, ranks: int) -> None:
    """Fewer microbatches than stages among them."""
    for microbatches in range(1, 2 * ranks + 4):
        table = pipeline.by_name(name, ranks, microbatches)
        pipeline.verify(table)
        assert (table.num_ranks, table.num_microbatches) == (ranks, microbatches)
        assert microbatches > 3 or is_right(table)


@pytest.mark.parametrize("name", pipeline.names())
def test_times_are_the_slots_of_actions_that_take_one_each(name: str) -> None:
    table = pipeline.by_name(name, 4, 9)
    # In a table that splits, a whole backward would take two: that is dualpipe_v alone.
    if name != "dualpipe_v":
        assert table.time.tolist() == pipeline.simulate(table, 1, 1, 1).start.tolist()
    assert np.unique(table.time).tolist() == list(range(int(table.time.max()) + 1))


def test_a_large_size() -> None:
    """64 ranks, 512 microbatches: 65,536 actions and 64,512 messages."""
    table = pipeline.one_f_one_b(64, 512)
    assert pipeline.verify(table).num_messages == 2 * 63 * 512
    assert pipeline.simulate(table, 1, 2).idle.tolist() == [63 * 3] * 64


class TestInterleaved:
    """Narayanan 2021: the bubble of 1F1B, of stages that are so many times smaller."""

    @settings(max_examples=40, deadline=None)
    @given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 12), SECONDS, SECONDS)
    def test_bubble_and_memory(self, ranks: int, stages: int, more: int, forward: int, backward: int) -> None:
        """Of any number of microbatches from the number of ranks on."""
        microbatches = ranks + more
        found = pipeline.simulate(pipeline.interleaved(ranks, microbatches, stages), forward, backward)
        assert found.idle.tolist() == [(ranks - 1) * (forward + backward)] * ranks
        if more % ranks == 0:
            held = [(stages - 1) * ranks + 2 * (ranks - rank) - 1 for rank in range(ranks)]
            assert found.peak_activations.tolist() == [min(most, stages * microbatches) for most in held]

    def test_megatrons_fraction(self) -> None:
        """(P - 1) / v of the F + B of one microbatch, over M of them."""
        ranks, stages, microbatches = 4, 2, 8
        found = pipeline.simulate(pipeline.interleaved(ranks, microbatches, stages), 1, 2)
        busy = microbatches * stages * (1 + 2)
        assert found.idle[0] / busy == (ranks - 1) / (stages * microbatches)

    def test_order_by_hand(self) -> None:
        """Two groups of two microbatches on two ranks with two stages each: Megatron's order."""
        program = " ".join(action.cell for action in pipeline.interleaved(2, 4).program(0))
        assert program == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"

    def test_with_one_stage_it_is_another_1f1b(self) -> None:
        """Which holds more, since its ranks are two slots apart."""
        found = pipeline.verify(pipeline.interleaved(4, 8, 1))
        assert found.peak_activations.tolist() == [7, 5, 3, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 5), SECONDS, SECONDS, SECONDS)
def test_zero_bubble_h1(ranks: int, more: int, forward: int, input_: int, weights: int) -> None:
    """Qi 2023: (P - 1)(F + I - W), if W is the least of the three, with 1F1B's memory."""
    table = pipeline.zero_bubble_h1(ranks, 2 * ranks + more)
    found = pipeline.simulate(table, forward, input_, weights)
    assert found.idle.tolist() == [(ranks - 1) * (forward + input_ - min(forward, input_, weights))] * ranks
    assert found.peak_activations.tolist() == [ranks] * ranks


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(0, 5), SECONDS, SECONDS)
def test_zero_bubble_v(ranks: int, more: int, forward: int, less: int) -> None:
    """Qi 2023, section 6: no rank idles once it has begun, if F = I = W; it holds what 1F1B holds."""
    weights = max(forward - less + 1, (forward + 1) // 2)
    microbatches = 2 * ranks - 1 + more
    table = pipeline.zero_bubble_v(ranks, microbatches)
    found = pipeline.simulate(table, forward, forward, weights)
    # The last rank cannot begin earlier than this: no order is shorter.
    assert found.seconds == (ranks - 1) * forward + 2 * microbatches * (2 * forward + weights)
    assert found.peak_activations.max() == 2 * ranks
    if weights == forward:
        first = np.array([found.start[table.rank == rank].min() for rank in range(ranks)])
        last = np.array([found.end[table.rank == rank].max() for rank in range(ranks)])
        assert (last - first).tolist() == found.busy.tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 5), SECONDS, SECONDS)
def test_dualpipe_v(ranks: int, more: int, forward: int, weights: int) -> None:
    """DeepSeek 2025: (PP / 2 - 1)(F&B + B - 3 W) if pairs are one; less here; memory PP + 1."""
    weights = min(forward, weights)
    backward = forward + weights
    microbatches = 2 * ranks + more
    table = pipeline.dualpipe_v(ranks, microbatches)
    busy = 2 * microbatches * (forward + backward)
    published = (ranks - 1) * (forward + backward + backward - 3 * weights)
    assert seconds_of_pairs(table, forward, forward, weights) == busy + published
    found = pipeline.simulate(table, forward, forward, weights)
    assert found.idle.tolist() == [(ranks - 1) * (2 * forward - weights)] * ranks
    assert found.idle[0] <= published
    assert found.peak_activations.max() == min(2 * ranks + 1, 2 * microbatches)


def seconds_of_pairs(table: Pipeline, forward: float, input_: float, weights: float) -> float:
    """Return how long ``table`` takes if a forward and the whole backward after it start and end together.

    Except the last rank's first pair, which the published order does not overlap.
    """
    seconds = [forward, input_ + weights, input_, weights]
    groups = [paired(program, rank + 1 == table.num_ranks) for rank, program in enumerate(programs_of(table))]
    end: dict[Step, float] = {step: 0.0 for of_rank in groups for group in of_rank for step in group}
    changed = True
    while changed:
        changed = False
        for of_rank in groups:
            at = 0.0
            for group in of_rank:
                before = [(choices & end.keys()).pop() for step in group for choices in needs(table, step)]
                at = max([at, *(end[step] for step in before if step not in group)])
                at += sum(seconds[kind] for _, kind, _ in group)
                changed |= any(end[step] != at for step in group)
                end.update(dict.fromkeys(group, at))
    return max(end.values())


def paired(program: list[Step], is_last_rank: bool) -> list[list[Step]]:
    groups: list[list[Step]] = []
    skip = is_last_rank
    for step in program:
        pair = bool(groups) and step[1] == BACKWARD and [s[1] for s in groups[-1]] == [FORWARD]
        if pair and not skip:
            groups[-1].append(step)
        else:
            groups.append([step])
        skip = skip and not pair
    return groups


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("gpipe", [0, 1, 2]),
        ("one_f_one_b", [0, 1, 2]),
        ("zero_bubble_h1", [0, 1, 2]),
        ("interleaved", [0, 1, 2, 0, 1, 2]),
        ("interleaved(3)", [0, 1, 2] * 3),
        ("zero_bubble_v", [0, 1, 2, 2, 1, 0]),
        ("dualpipe_v", [0, 1, 2, 2, 1, 0]),
    ],
)
def test_placement(name: str, placement: list[int]) -> None:
    assert pipeline.by_name(name, 3, 4).rank_of_stage.tolist() == placement


@pytest.mark.parametrize("name", pipeline.names())
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None, True, [2]])
def test_sizes_that_are_none(name: str, value: Any) -> None:
    for sizes, argument in (((value, 2), "ranks"), ((2, value), "microbatches")):
        with pytest.raises(ValueError, match=f"^{argument} is .*, wanted a whole number of at least 1"):
            pipeline.by_name(name, *sizes)


def test_sizes_that_are_too_large() -> None:
    with pytest.raises(ValueError, match="actions, wanted at most 16777216"):
        pipeline.one_f_one_b(10**4, 10**5)
    with pytest.raises(ValueError, match="ranks is 100000, wanted at most 65536"):
        pipeline.one_f_one_b(10**5, 1)


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_stages_per_rank_that_are_none(value: Any) -> None:
    with pytest.raises(ValueError, match="stages_per_rank is .*, wanted a whole number of at least 1"):
        pipeline.interleaved(2, 2, value)


@pytest.mark.parametrize("name", ["1f1b", "", "gpipe(2)", "interleaved()", "interleaved(x)", "interleaved(2", None, 3])
def test_names_that_are_none(name: Any) -> None:
    with pytest.raises(ValueError, match="^schedule is "):
        pipeline.by_name(name, 2, 2)


def test_names() -> None:
    for name in pipeline.names():
        assert pipeline.by_name(f" {name} ", 2, 2).name.startswith(name)
    assert pipeline.by_name("interleaved( 3 )", 2, 2).num_stages == 6


def test_columns_of_what_is_made_are_read_only() -> None:
    table = pipeline.gpipe(2, 2)
    with pytest.raises(ValueError, match="read-only"):
        table.stage[0] = 1


def test_how_they_are_shown() -> None:
    table = pipeline.zero_bubble_h1(2, 3)
    assert repr(table) == "<pipeline zero_bubble_h1: 2 stages on 2 ranks, 3 microbatches, 18 actions>"
    assert str(table.program(1)[1]) == "input gradient 0 of stage 1"
    assert table.program(1)[1].cell == "1I0"
