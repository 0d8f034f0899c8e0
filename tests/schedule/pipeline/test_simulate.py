"""Simulated times: the published formulas, and a plain relaxation of all times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm.schedule import pipeline
from tests.schedule.pipeline.reference import programs_of, times_of
from tests.schedule.pipeline.tables import TABLES

SIZES = [(1, 1), (1, 5), (2, 2), (4, 4), (4, 16), (8, 3), (7, 20)]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("make", [pipeline.gpipe, pipeline.one_f_one_b])
def test_bubble_of_whole_backwards(make: Any, ranks: int, microbatches: int) -> None:
    """Huang 2019, Narayanan 2021: each rank idles (P - 1)(F + B), the fraction (P - 1)/(M + P - 1)."""
    forward, backward = 3.0, 5.0
    found = pipeline.simulate(make(ranks, microbatches), forward=forward, backward=backward)
    assert found.seconds == (microbatches + ranks - 1) * (forward + backward)
    assert found.idle.tolist() == [(ranks - 1) * (forward + backward)] * ranks
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-15)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_memory_of_whole_backwards(ranks: int, microbatches: int) -> None:
    peak = pipeline.simulate(pipeline.gpipe(ranks, microbatches), 1, 2).peak_activations
    assert peak.tolist() == [microbatches] * ranks
    peak = pipeline.simulate(pipeline.one_f_one_b(ranks, microbatches), 1, 2).peak_activations
    assert peak.tolist() == [min(ranks - rank, microbatches) for rank in range(ranks)]


def test_transfers_delay_the_first_and_the_last_microbatch() -> None:
    """With one microbatch everything is one chain: all forwards, all backwards, each boundary there and back."""
    found = pipeline.simulate(pipeline.one_f_one_b(3, 1), [1, 2, 4], [8, 16, 32], transfer=[0.25, 0.5])
    assert found.seconds == 7 + 56 + 1.5
    assert found.start.tolist() == [0, 56.5, 1.25, 40.25, 3.75, 7.75]


def test_weights_are_part_of_backwards_that_are_whole() -> None:
    table = pipeline.one_f_one_b(3, 4)
    assert pipeline.simulate(table, 1, 2, weights=7).seconds == pipeline.simulate(table, 1, 2).seconds


def durations(table: pipeline.Pipeline) -> st.SearchStrategy[list[list[float]]]:
    """Seconds of forward, backward and weights at each stage: small fractions, whose sums are exact."""
    eighths = st.integers(0, 40).map(lambda n: n / 8)
    return st.lists(st.lists(eighths, min_size=table.num_stages, max_size=table.num_stages), min_size=4, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_times_are_those_of_a_plain_relaxation(data: st.DataObject) -> None:
    table = data.draw(TABLES)
    forward, backward, weights, transfer = data.draw(durations(table))
    found = pipeline.simulate(table, forward, backward, weights, transfer[1:])
    whole = [b + w if table.splits_weights else b for b, w in zip(backward, weights, strict=True)]
    by_kind = {
        pipeline.FORWARD: forward,
        pipeline.BACKWARD: whole,
        pipeline.BACKWARD_INPUT: backward,
        pipeline.WEIGHTS: weights,
    }
    seconds = {step: by_kind[step[1]][step[0]] for program in programs_of(table) for step in program}
    wanted = times_of(table, seconds, transfer[1:])
    steps = list(zip(table.stage.tolist(), table.kind.tolist(), table.microbatch.tolist(), strict=True))
    assert found.start.tolist() == [wanted[step][0] for step in steps]
    assert found.end.tolist() == [wanted[step][1] for step in steps]
    assert found.seconds == max(end for _, end in wanted.values()) - min(start for start, _ in wanted.values())


def test_shared_cores_by_hand() -> None:
    """Two ranks on one core: they take turns in the chain, and halve each other's speed where both work."""
    table = pipeline.gpipe(2, 2)
    found = pipeline.simulate(table, forward=1, backward=1, cores=1)
    # 0 to 1: F0 of rank 0. Then F1 of rank 0 and F0 of rank 1 at half speed until 3, then rank 1 alone: F1, B0.
    # At 5 rank 0's B0 and rank 1's B1 until 7, then rank 0's B1.
    assert found.start.tolist() == [0, 1, 5, 7, 1, 3, 4, 5]
    assert found.end.tolist() == [1, 3, 7, 8, 3, 4, 5, 7]
    assert found.seconds == 8


@settings(max_examples=30, deadline=None)
@given(TABLES, st.integers(1, 5), st.integers(0, 3), st.data())
def test_shared_cores_do_all_the_work(table: pipeline.Pipeline, cores: int, transfer: int, data: st.DataObject) -> None:
    forward, backward, weights, _ = data.draw(durations(table))
    alone = pipeline.simulate(table, forward, backward, weights, transfer)
    shared = pipeline.simulate(table, forward, backward, weights, transfer, cores=cores)
    work = float((alone.end - alone.start).sum())
    assert shared.seconds >= alone.seconds - 1e-9
    assert shared.seconds >= work / cores - 1e-9
    assert ((shared.end - shared.start) - (alone.end - alone.start)).min() >= -1e-9
    if cores >= table.num_ranks:
        assert shared.seconds == alone.seconds
    # The work that is done while at most ``cores`` ranks compute adds up to all of it.
    moments = np.unique(np.concatenate([shared.start, shared.end]))
    middles = (moments[1:] + moments[:-1]) / 2
    computing = [int(((shared.start < t) & (t < shared.end)).sum()) for t in middles]
    done = sum(min(n, cores) * float(d) for n, d in zip(computing, np.diff(moments), strict=True))
    assert done == pytest.approx(work, abs=1e-9)


@pytest.mark.parametrize("cores", [0, -1, 1.5, True, "2"])
def test_cores_that_are_none(cores: Any) -> None:
    with pytest.raises(ValueError, match="cores is .*, wanted a whole number of at least 1, or None"):
        pipeline.simulate(pipeline.gpipe(2, 2), 1, 1, cores=cores)


@pytest.mark.parametrize("name", ["forward", "backward", "weights", "transfer"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "x", None, [1, 2, 3, 4, 5], [[1]], [1, -1, 1], object()])
def test_durations_that_are_none(name: str, value: Any) -> None:
    durations = {"forward": 1, "backward": 1, name: value}
    with pytest.raises(ValueError, match=f"^{name} "):
        pipeline.simulate(pipeline.gpipe(3, 2), **durations)


def test_nothing_takes_no_time() -> None:
    found = pipeline.simulate(pipeline.one_f_one_b(2, 2), 0, 0)
    assert (found.seconds, found.bubble) == (0, 0)
