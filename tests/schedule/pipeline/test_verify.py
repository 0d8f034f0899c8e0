"""verify is right about right and wrong tables; errors say which action, or who waits for whom."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm.schedule import pipeline
from pycomm.schedule.pipeline import BACKWARD, BACKWARD_INPUT, FORWARD, WEIGHTS, Pipeline, ScheduleError
from tests.schedule.pipeline.reference import comes_to_its_end, is_right, operations, programs_of
from tests.schedule.pipeline.tables import TABLES, table_of


def refusal(table: Any, **options: Any) -> str:
    with pytest.raises(ScheduleError) as caught:
        pipeline.verify(table, **options)
    return str(caught.value)


@settings(max_examples=40, deadline=None)
@given(TABLES)
def test_what_is_made_is_right(table: Pipeline) -> None:
    assert is_right(table)
    proof = pipeline.verify(table)
    assert proof.num_actions == len(table) == sum(map(len, programs_of(table)))
    every = [operation for rank in range(table.num_ranks) for operation in operations(table, rank)]
    assert proof.num_messages == sum(what == "send" for what, *_ in every)
    assert sorted(proof.order) == list(range(len(table)))
    for rank in range(table.num_ranks):
        held = peak = 0
        for action in table.program(rank):
            held += {FORWARD: 1, BACKWARD: -1, BACKWARD_INPUT: 0, WEIGHTS: -1}[action.kind]
            peak = max(peak, held)
        assert (held, peak) == (0, proof.peak_activations[rank])


@settings(max_examples=60, deadline=None)
@given(TABLES, st.integers(0, 3), st.randoms(use_true_random=False), st.data())
def test_deadlocks_are_those_of_ranks_that_go_on_at_random(
    table: Pipeline, buffers: int, chance: random.Random, data: st.DataObject
) -> None:
    """Whoever goes first, all orders come to the end, or none does."""
    pairs = [(p, c) for p in range(table.num_stages) for c in range(p + 1, table.num_stages)]
    skips = tuple(data.draw(st.lists(st.sampled_from(pairs), max_size=2))) if pairs else ()
    ends = {comes_to_its_end(table, buffers, chance.choice, skips) for _ in range(3)}
    assert len(ends) == 1
    if ends == {True}:
        pipeline.verify(table, buffers, skips)
    else:
        assert refusal(table, buffers=buffers, skips=skips).startswith("deadlock: rank ")


@settings(max_examples=60, deadline=None)
@given(TABLES, st.randoms(use_true_random=False))
def test_orders_by_chance(table: Pipeline, chance: random.Random) -> None:
    """Swap two actions of a rank, whether it harms or not."""
    rank = chance.randrange(table.num_ranks)
    mine = np.flatnonzero(table.rank == rank)
    one, other = chance.choice(mine), chance.choice(mine)
    time = table.time.copy()
    time[[one, other]] = time[[other, one]]
    swapped = replace(table, time=time)
    if is_right(swapped):
        pipeline.verify(swapped)
    else:
        refusal(swapped)


def test_one_f_one_b_without_buffers() -> None:
    assert refusal(pipeline.one_f_one_b(2, 3), buffers=0) == (
        "deadlock: rank 0 waits for rank 1 to receive forward 1 of stage 0, its action 1; "
        "rank 1 waits for rank 0 to receive backward 0 of stage 1, its action 1"
    )
    pipeline.verify(pipeline.one_f_one_b(2, 3), buffers=1)
    pipeline.verify(pipeline.gpipe(4, 9), buffers=0)


def test_a_buffer_that_is_too_small() -> None:
    assert refusal(pipeline.zero_bubble_v(4, 8), buffers=1) == (
        "deadlock: rank 2 waits for rank 3 to make room for forward 5 of stage 2, its action 13: it has left 1 "
        "earlier message unreceived; rank 3 waits for rank 2 to make room for forward 4 of stage 4, its action 13: "
        "it has left 1 earlier message unreceived"
    )
    pipeline.verify(pipeline.zero_bubble_v(4, 8), buffers=2)


def test_orders_that_wait_for_each_other() -> None:
    table = table_of([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    assert refusal(table) == (
        "deadlock: rank 0 waits for rank 1 to send backward 0 of stage 1, which its action 1, backward 0 of stage 0, "
        "needs; rank 1 waits for rank 0 to send forward 1 of stage 0, which its action 1, forward 1 of stage 1, needs"
    )


WRONG: dict[str, tuple[list[list[str]], dict[str, Any]]] = {
    "rank 1, action 0 (forward 0 of stage 0): the stage is rank 0's": (
        [["0B0"], ["0F0", "1F0", "1B0"]],
        {"rank_of_stage": np.array([0, 1])},
    ),
    "rank 0, action 2 (forward 0 of stage 0): done a second time, after rank 0, action 0 (forward 0 of stage 0)": (
        [["0F0", "0B0", "0F0"]],
        {},
    ),
    "rank 0, action 2 (weight gradient 0 of stage 0): done a second time, after rank 0, action 1 "
    "(backward 0 of stage 0)": ([["0F0", "0B0", "0W0"]], {}),
    "rank 0, action 0 (backward 0 of stage 0): comes before forward 0 of stage 0, which it needs": (
        [["0B0", "0F0"]],
        {},
    ),
    "rank 0, action 1 (weight gradient 0 of stage 0): comes before input gradient 0 of stage 0, which it needs": (
        [["0F0", "0W0", "0I0"]],
        {},
    ),
    "rank 0, action 0 (forward 0 of stage 1): comes before forward 0 of stage 0, which it needs": (
        [["1F0", "0F0", "1B0", "0B0"]],
        {},
    ),
    "rank 0, action 2 (backward 0 of stage 0): comes before backward 0 of stage 1, which it needs": (
        [["0F0", "1F0", "0B0", "1B0"]],
        {},
    ),
    "weight gradient 1 of stage 0 is missing: rank 0 never does it": ([["0F0", "0B0", "0F1", "0I1"]], {}),
    "rank 0, action 1 (input gradient 0 of stage 0): this table says that it does not split backwards": (
        [["0F0", "0I0", "0W0"]],
        {"splits_weights": False},
    ),
    "rank 0, action 1 (backward 0 of stage 0): at its time, 1, is also forward 1 of stage 0": (
        [["0F0", "0B0", "0F1", "0B1"]],
        {"time": np.array([0, 1, 1, 2])},
    ),
    "rank 0 at time 1 (kind 7 0 of stage 0): kind is not in 0 ... 3": ([["0F0", "0B0"]], {"kind": np.array([0, 7])}),
    "backward 1 of stage 0 is missing: rank 0 never does it; 1 stages x 2 microbatches need 2 of that kind": (
        [["0F0", "0B0", "0F1"]],
        {},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_are_named(message: str) -> None:
    cells, changes = WRONG[message]
    assert refusal(table_of(cells, **changes)) == message


def test_a_rank_may_have_nothing_to_do() -> None:
    table = replace(table_of([["0F0", "0B0"]]), num_ranks=3)
    assert pipeline.verify(table).peak_activations.tolist() == [1, 0, 0]


def test_whole_and_split_backwards_in_one_table() -> None:
    assert pipeline.verify(table_of([["0F0", "0B0", "0F1", "0I1", "0W1"]])).peak_activations.tolist() == [1]


def test_peak_memory_of_stages_that_differ() -> None:
    proof = pipeline.verify(pipeline.zero_bubble_v(2, 3))
    # Rank 0 holds three of stage 0 and one of stage 3 at most, rank 1 three of stage 1 and one of stage 2.
    assert proof.peak_activations.tolist() == [4, 4]
    assert proof.peak_memory([10.0, 0.5, 0.25, 1.0]).tolist() == [31.0, 1.75]
    for sizes in ([1, 2], 3, [1, 2, 3, -1], [1, 2, 3, float("nan")], ["a"] * 4):
        with pytest.raises(ValueError, match="sizes is "):
            proof.peak_memory(sizes)


class TestSkips:
    """Tensors that skip stages."""

    def test_they_are_messages(self) -> None:
        table = pipeline.one_f_one_b(4, 5)
        assert pipeline.verify(table, skips=[(0, 3)]).num_messages == pipeline.verify(table).num_messages + 10

    def test_they_take_room(self) -> None:
        """Where there is room for one message, three of one action to the same rank may be too many."""
        pipeline.verify(pipeline.gpipe(3, 3), buffers=0)
        pipeline.verify(pipeline.gpipe(3, 3), buffers=0, skips=[(0, 2)])
        table = pipeline.one_f_one_b(3, 5)
        pipeline.verify(table, buffers=1)
        assert "make room" in refusal(table, buffers=1, skips=[(1, 2), (1, 2)])

    def test_not_within_a_rank(self) -> None:
        table = pipeline.zero_bubble_v(2, 3)
        assert pipeline.verify(table, skips=[(0, 3), (1, 2)]).num_messages == pipeline.verify(table).num_messages

    @pytest.mark.parametrize("pair", [(2, 1), (1, 1), (0, 4), (-1, 2)])
    def test_they_go_forward(self, pair: tuple[int, int]) -> None:
        assert refusal(pipeline.gpipe(4, 2), skips=[pair]) == (
            f"skips has {pair}, wanted a producer before its consumer, both in 0 ... 3"
        )

    @pytest.mark.parametrize("skips", [5, None, [5], ["ab"], [(0, 1, 2)], [(0, 1.0)], [(False, True)], [(0, None)]])
    def test_they_are_pairs(self, skips: Any) -> None:
        assert "wanted pairs (producer stage, consumer stage)" in refusal(pipeline.gpipe(4, 2), skips=skips)


@pytest.mark.parametrize("buffers", [-1, 1.0, "1", True, [1]])
def test_buffers_that_are_none(buffers: Any) -> None:
    with pytest.raises(ValueError, match="buffers is .*, wanted a whole number of at least 0, or None"):
        pipeline.verify(pipeline.gpipe(2, 2), buffers=buffers)
