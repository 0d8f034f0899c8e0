"""Counts of gradients, without autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pycomm.collectives.gradients import GradientCounter, GradientCounts, PassGate, handler_of


class Tasks:
    """Stand-in for autograd: the number of the running backward pass."""

    def __init__(self) -> None:
        self.number = 1

    def __call__(self) -> int:
        return self.number


class Hooked:
    """Parameter whose hook counts as number ``index`` in ``counts``."""

    def __init__(self, gate: PassGate, counts: GradientCounts | None, index: int) -> None:
        self.param = torch.nn.Parameter(torch.zeros(2))
        self.param.grad = torch.zeros(2)
        self.counter, self.handled = GradientCounter(gate), 0
        self.counter.count_in(counts, index)
        self.hook: Callable[[torch.Tensor], None] = self.counter.hook(self.handle)

    def handle(self, param: torch.Tensor) -> None:
        assert param is self.param
        self.handled += 1

    def count(self) -> bool:
        """Call the hook; return whether it counted and left the handler alone."""
        before = self.handled
        assert self.hook(self.param) is None
        return self.handled == before


def counters(counts: GradientCounts, size: int, gate: PassGate) -> list[Hooked]:
    return [Hooked(gate, counts, index) for index in range(size)]


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
    hooked = Hooked(gate, counts, 0)
    hooked.param.grad = None
    assert not hooked.count(), "backward made none, or a hook removed it"
    hooked.param.grad = torch.zeros(2)
    hooked.counter.count_in(None, 0)
    assert not hooked.count(), "each must be handled"
    hooked.counter.count_in(counts, 0)
    assert hooked.count()


def test_hooks_know_their_handlers_and_pass_errors_on() -> None:
    hooked = Hooked(PassGate(lambda: -1), GradientCounts(1), 0)
    assert handler_of(hooked.hook) == hooked.handle
    assert handler_of(len) is handler_of(hooked.handle) is None

    def fail(_: torch.Tensor) -> None:
        raise KeyError("from the handler")

    with pytest.raises(KeyError, match="from the handler"):
        hooked.counter.hook(fail)(hooked.param)
    gate = PassGate(lambda: 0)
    gate.open()
    with pytest.raises(AttributeError, match="grad"):
        Hooked(gate, GradientCounts(1), 0).hook(object())  # type: ignore[arg-type]


def test_an_index_beyond_the_bucket() -> None:
    counts = GradientCounts(2)
    with pytest.raises(ValueError, match="index is beyond the bucket's gradients"):
        counts.note(2)


def test_errors_of_what_tells_the_pass() -> None:
    def fail() -> int:
        raise KeyError("no pass")

    with pytest.raises(KeyError, match="no pass"):
        PassGate(fail).open()
