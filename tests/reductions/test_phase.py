"""Every pair of phase and event of a step: what it leads to, or that it is an assertion."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm.training.reductions.phase import Phase, Role, StepState

Event = Callable[[StepState], object]

IDLE, COLLECTING, SENDING, AVERAGED, STEPPING, STEPPED, STOPPED, CLOSED = Phase
ILLEGAL = None

EVENTS: dict[str, Event] = {
    "a pass begins": lambda state: state.pass_begins(is_last=False),
    "the last pass begins": lambda state: state.pass_begins(is_last=True),
    "a reduction begins": lambda state: state.reduces(Role.SKIPS),
    "a pass ends": lambda state: state.pass_ends(holds=True),
    "a pass fails": StepState.pass_fails,
    "gradients are cleared": StepState.cleared,
    "averages are handed out": lambda state: state.handed_out(False, has_averages=True),
    "the reduction succeeds": lambda state: state.reduced(succeeded=True),
    "the reduction fails": lambda state: state.reduced(succeeded=False),
    "step() begins": StepState.step_begins,
    "averages are used": StepState.uses_averages,
    "the step is left out": StepState.leaves_out_step,
    "a closure ends": lambda state: state.closure_ends(1),
    "step() ends": StepState.step_ends,
    "stepped": StepState.stepped,
    "a forward begins": StepState.forward_begins,
    "zero_grad()": StepState.loop_begins,
    "this rank stops": lambda state: state.stops("an error"),
    "detach()": StepState.closes,
}

SAME = tuple(Phase)
AROUND = (STEPPING, COLLECTING, SENDING, STEPPING, STEPPING, STEPPING, STOPPED, CLOSED)
BEGINS = {IDLE, COLLECTING, AVERAGED, STEPPING, STEPPED}

TABLE: dict[str, tuple[Phase | None, ...]] = {
    "a pass begins": tuple(COLLECTING if phase in BEGINS else ILLEGAL for phase in Phase),
    "the last pass begins": tuple(SENDING if phase in BEGINS else ILLEGAL for phase in Phase),
    "a reduction begins": tuple(SENDING if phase in BEGINS else ILLEGAL for phase in Phase),
    "a pass ends": (ILLEGAL, COLLECTING, SENDING, *[ILLEGAL] * 5),
    "a pass fails": (IDLE, COLLECTING, IDLE, *SAME[3:]),
    "gradients are cleared": (IDLE, IDLE, *SAME[2:]),
    "averages are handed out": (ILLEGAL, ILLEGAL, SENDING, ILLEGAL, ILLEGAL, ILLEGAL, STOPPED, ILLEGAL),
    "the reduction succeeds": (IDLE, COLLECTING, AVERAGED, *SAME[3:]),
    "the reduction fails": (IDLE, COLLECTING, IDLE, *SAME[3:]),
    "step() begins": AROUND,
    "averages are used": SAME,
    "the step is left out": SAME,
    "a closure ends": AROUND,
    "step() ends": SAME,
    "stepped": tuple(STEPPED if phase is STEPPING else phase for phase in AROUND),
    "a forward begins": tuple(IDLE if phase is STEPPED else phase for phase in Phase),
    "zero_grad()": tuple(IDLE if phase in (AVERAGED, STEPPED) else phase for phase in Phase),
    "this rank stops": (*[STOPPED] * 7, CLOSED),
    "detach()": (CLOSED,) * 8,
}

WAYS: dict[Phase, tuple[str, ...]] = {
    IDLE: (),
    COLLECTING: ("a pass begins",),
    SENDING: ("the last pass begins",),
    AVERAGED: ("the last pass begins", "averages are handed out", "the reduction succeeds"),
    STEPPING: ("step() begins",),
    STEPPED: ("step() begins", "step() ends", "stepped"),
    STOPPED: ("this rank stops",),
    CLOSED: ("detach()",),
}
"""Events that lead to each phase."""


def state_after(*events: str) -> StepState:
    state = StepState()
    for event in events:
        EVENTS[event](state)
    return state


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, EVENTS)))
def test_every_pair_of_phase_and_event(phase: Phase, event: str) -> None:
    state, wanted = state_after(*WAYS[phase]), TABLE[event][phase.value]
    assert state.phase is phase
    if wanted is ILLEGAL:
        with pytest.raises(AssertionError):
            EVENTS[event](state)
    else:
        EVENTS[event](state)
        assert state.phase is wanted


@given(st.lists(st.sampled_from(list(EVENTS)), max_size=40))
def test_counts_stay_in_order_after_any_events(events: list[str]) -> None:
    """A sequence of legal events: reductions were used in order, and each at most once."""
    state = StepState()
    for event in events:
        if TABLE[event][state.phase.value] is ILLEGAL:
            continue
        EVENTS[event](state)
        assert 0 <= state.used <= state.reductions >= state.steps >= 0
        assert state.depth >= 0 <= state.passes
        assert state.is_used == (state.used == state.reductions)
        assert not (state.phase is IDLE and event in ("the reduction fails", "gradients are cleared") and state.passes)


def test_a_step_uses_the_averages_before_it_and_its_closure_those_of_its_own() -> None:
    state = state_after("the last pass begins", "averages are handed out", "the reduction succeeds")
    state.step_begins()
    assert (state.has_averages, state.is_used) == (True, False)
    state.uses_averages()
    assert state.has_averages  # in a closure
    for event in ("the last pass begins", "averages are handed out", "the reduction succeeds", "a closure ends"):
        EVENTS[event](state)
    assert (state.phase, state.is_used) == (STEPPING, False)
    state.uses_averages()
    assert state.step_ends()
    state.stepped()
    assert (state.reductions, state.used, state.steps) == (2, 2, 2)
    state.step_begins()
    assert not state.has_averages


def test_a_reduction_without_gradients_leaves_nothing_to_use() -> None:
    for before in (False, True):  # whether averages wait for a step
        state = StepState()
        if before:
            state = state_after("the last pass begins", "averages are handed out", "the reduction succeeds")
        state.reduces(Role.SKIPS)
        has_pass = [state.has_pass]
        state.handed_out(False, has_averages=False)
        state.reduced(succeeded=True)
        assert [*has_pass, state.has_pass] == [False, True]
        assert state.is_used is not before
        state.step_begins()
        assert state.has_averages is before


def test_two_optimizers_may_use_the_same_averages() -> None:
    """The attached one after another that has its parameters, too; but none of them twice."""
    state = state_after("the last pass begins", "averages are handed out", "the reduction succeeds")
    state.uses_averages(is_attached=False)
    assert (state.is_used, state.steps) == (True, 1)
    found = []
    for _ in range(2):
        state.step_begins()
        found.append(state.has_averages)
        state.uses_averages()
        state.step_ends()
    assert found == [True, False]
    assert state.steps == 1


def test_nested_calls_of_step_are_one() -> None:
    state = StepState()
    assert state.step_begins()
    assert not state.step_begins()
    assert not state.step_ends()
    assert state.is_stepping
    assert state.step_ends()
    assert state.step_ends()  # it was entered by a step that raised


def test_compression_is_owed_a_step_until_one_uses_it() -> None:
    state = state_after("the last pass begins")
    state.handed_out(True, has_averages=True)
    state.reduced(succeeded=True)
    assert not state.owes_step()  # before the first step
    state.uses_averages()
    state.pass_begins(is_last=True)
    state.handed_out(True, has_averages=True)
    state.reduced(succeeded=True)
    assert state.owes_step()
    state.leaves_out_step()
    assert not state.owes_step()


def test_a_newcomer_counts_as_the_others_do() -> None:
    state = StepState()
    state.resumes(7, 5)
    state.reduces(Role.NEW)
    state.pass_begins(is_last=True)  # its own first pass, of which nothing is sent
    assert state.role is Role.NEW
    state.pass_fails()
    assert state.phase is SENDING  # what was sent for it goes on
    state.handed_out(False, has_averages=True)
    state.reduced(succeeded=True)
    assert (state.reductions, state.steps, state.role) == (8, 5, Role.BATCH)
    assert not state.is_used
