"""Counts of gradients, without autograd."""

from __future__ import annotations

import pytest

from pycomm.collectives.counting import GradientCounter, GradientCounts, PassGate


class Tasks:
    """Stand-in for autograd: the number of the running backward pass."""

    def __init__(self) -> None:
        self.number = 1

    def __call__(self) -> int:
        return self.number


def counters(counts: GradientCounts, size: int, gate: PassGate) -> list[GradientCounter]:
    return [GradientCounter(gate, counts, index, True) for index in range(size)]


def test_only_what_is_known_and_completes_nothing_is_counted() -> None:
    tasks, counts = Tasks(), GradientCounts(3)
    gate = PassGate(tasks)
    gate.open()
    each = counters(counts, 3, gate)
    counts.begin_pass()
    assert not each[0].count(), "nothing is known in the first pass"
    for index in (0, 1, 1, 2):
        counts.note(index)
    assert not counts.is_complete(), "nor is it known what is complete"
    counts.end_pass()
    assert [counts.expected(index) for index in range(3)] == [1, 2, 1]

    counts.begin_pass()
    assert [counts.fired(index) for index in range(3)] == [0, 0, 0]
    assert each[1].count()
    assert each[0].count()
    assert not each[0].count(), "once more than usual"
    assert each[1].count()
    assert not each[1].count()
    assert not counts.is_complete()
    assert not each[2].count(), "the last one that is missing"
    counts.note(2)
    assert counts.is_complete()
    assert [counts.fired(index) for index in range(3)] == [1, 2, 1]


def test_gates_are_open_for_one_pass() -> None:
    tasks, counts = Tasks(), GradientCounts(2)
    gate = PassGate(tasks)
    first, _ = counters(counts, 2, gate)
    for index in range(2):
        counts.note(index)
    counts.end_pass()
    counts.begin_pass()
    assert not first.count()
    gate.open()
    tasks.number = 2
    assert not first.count(), "another pass"
    tasks.number = -1
    gate.open()
    assert not first.count(), "none at all"
    tasks.number = 3
    gate.open()
    gate.close()
    assert not first.count()
    gate.open()
    assert first.count()


def test_what_is_no_plain_gradient_is_never_counted() -> None:
    gate, counts = PassGate(lambda: 0), GradientCounts(2)
    counts.note(0)
    counts.note(1)
    counts.end_pass()
    counts.begin_pass()
    gate.open()
    assert not GradientCounter(gate, counts, 0, False).count()
    assert GradientCounter(gate, counts, 0, True).count()


def test_an_index_beyond_the_bucket() -> None:
    counts = GradientCounts(2)
    with pytest.raises(ValueError, match="index is beyond the bucket's gradients"):
        counts.note(2)


def test_errors_of_what_tells_the_pass() -> None:
    def fail() -> int:
        raise KeyError("no pass")

    with pytest.raises(KeyError, match="no pass"):
        PassGate(fail).open()
