"""How long a merge waits for those that are not there."""

from __future__ import annotations

import heapq
import itertools

import pytest

from pycomm.training.asynchronous.decoupled import GraceQuorum, RankArrivals


def after_rounds(durations: list[list[float]], samples: float = 1.0) -> RankArrivals:
    """Arrivals of ranks that took so long, in turns, and have all just begun, at time 0."""
    arrivals = RankArrivals()
    for rank, taken in enumerate(durations):
        now = -sum(taken)
        for each in taken:
            arrivals.begin(rank, now)
            now += each
            arrivals.arrive(rank, now, samples)
        arrivals.begin(rank, 0.0)
    return arrivals


def test_one_that_is_nearly_there_is_waited_for_and_one_that_is_far_is_not() -> None:
    arrivals = after_rounds([[1.0], [1.0], [1.0], [1.1]])
    assert arrivals.worth_waiting([0, 1, 2], 3, 1.0) == pytest.approx(0.1)
    arrivals = after_rounds([[1.0], [1.0], [1.0], [10.0]])
    assert arrivals.worth_waiting([0, 1, 2], 3, 1.0) == 0.0
    # Three wait 0.3 s each for one; or it waits 0.7 s for them, and makes 1 / 1.3 samples a second: 0.9 against 0.54.
    arrivals = after_rounds([[1.0], [1.0], [1.0], [1.3]])
    assert arrivals.worth_waiting([0, 1, 2], 3, 1.0) == 0.0
    # 0.6 against 0.8 / 1.2.
    arrivals = after_rounds([[1.0], [1.0], [1.0], [1.2]])
    assert arrivals.worth_waiting([0, 1, 2], 3, 1.0) == pytest.approx(0.2)


def test_samples_count_and_not_ranks() -> None:
    arrivals = RankArrivals()
    for rank, (duration, samples) in enumerate([(1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.3, 10.0)]):
        arrivals.begin(rank, -duration)
        arrivals.arrive(rank, 0.0, samples)
        arrivals.begin(rank, 0.0)
    assert arrivals.worth_waiting([0, 1, 2], 3, 1.0) == pytest.approx(0.3)


def test_one_that_takes_longer_than_ever_is_given_up() -> None:
    arrivals = after_rounds([[1.0, 1.0], [1.0, 1.0], [1.05, 1.2]])
    assert arrivals.worth_waiting([0, 1], 2, 1.0) == pytest.approx(0.125)
    assert arrivals.worth_waiting([0, 1], 2, 1.06) == pytest.approx(0.14)  # it takes 1.2 then
    assert arrivals.worth_waiting([0, 1], 2, 1.3) == 0.0


def test_nothing_is_waited_for_of_which_nothing_is_known() -> None:
    arrivals = RankArrivals()
    for rank in range(3):
        arrivals.begin(rank, 0.0)
    arrivals.arrive(0, 1.0, 1.0)
    assert arrivals.worth_waiting([0], 1, 1.0) == 0.0
    arrivals.forget(0)
    assert arrivals.worth_waiting([], 1, 1.0) == 0.0


def rounds_of(paces: list[float], quorum: int, waits: bool, until: float = 200.0) -> tuple[float, float]:
    """The share of the ranks' time in which they work, and what merges have on average; with a clock of its own."""
    clock = [0.0]
    mode = GraceQuorum(quorum, clock=lambda: clock[0])
    for rank in range(len(paces)):
        mode.join(rank)
        mode.pulled(rank)
    ticks = itertools.count()
    events = [(pace, next(ticks), rank) for rank, pace in enumerate(paces)]
    heapq.heapify(events)
    idle, sizes, arrived = 0.0, list[int](), dict[int, float]()
    while events[0][0] < until:
        due = clock[0] + mode.seconds_left() if waits and mode.num_collected >= quorum else float("inf")
        if clock[0] < due < events[0][0]:
            clock[0] = due
        else:
            clock[0], _, rank = heapq.heappop(events)
            mode.push(rank, 0, 1.0)
            arrived[rank] = clock[0]
        if mode.num_collected >= quorum and (not waits or mode.is_due()):
            mode.updated()
            sizes.append(len(arrived))
            for rank, at in arrived.items():
                idle += clock[0] - at
                mode.pulled(rank)
                heapq.heappush(events, (clock[0] + paces[rank], next(ticks), rank))
            arrived.clear()
    return 1 - idle / (len(paces) * clock[0]), sum(sizes) / len(sizes)


@pytest.mark.parametrize(
    "paces", [[1.0, 1.0, 1.0, 1.1], [1.0, 1.0, 1.0, 10.0], [1.0, 1.05, 1.9, 2.0], [1.0, 1.1, 5.0, 5.2]]
)
def test_ranks_work_more_than_if_all_are_waited_for_and_merges_have_more_than_the_quorum(paces: list[float]) -> None:
    share, size = rounds_of(paces, 2, waits=True)
    share_of_all, size_of_all = rounds_of(paces, 4, waits=False)
    share_of_quorum, size_of_quorum = rounds_of(paces, 2, waits=False)
    assert size_of_all == 4
    assert size >= size_of_quorum
    assert share > share_of_all
    assert share > share_of_quorum - 0.03
