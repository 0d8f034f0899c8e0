from __future__ import annotations

from collections.abc import Iterator

from pycomm import schedule
from pycomm.schedule import COPY, REDUCE, Round, Schedule
from pycomm.schedule.picture import picture

SMALL = """\
by hand: 3 ranks, 11 chunks

round   rank 0      rank 1       rank 2
0       c10 +> 2    all +> 0     .
        c0-3 +> 1
1       .           c9-10 -> 2   c2 +> 0
"""


def by_hand() -> Iterator[Round]:
    yield Round.of([0, 1, 0], [2, 0, 1], [10, 0, 0], [1, 11, 4], REDUCE)
    yield Round.of([1, 2], [2, 0], [9, 2], [2, 1], [COPY, REDUCE])


def test_shows_who_sends_what_to_whom() -> None:
    assert picture(Schedule("by hand", 3, 11, by_hand)) == SMALL


def test_ring() -> None:
    assert picture(schedule.ring(3)) == (
        "ring: 3 ranks, 3 chunks\n"
        "\n"
        "round   rank 0    rank 1    rank 2\n"
        "0       c2 +> 1   c0 +> 2   c1 +> 0\n"
        "1       c1 +> 1   c2 +> 2   c0 +> 0\n"
        "2       c0 -> 1   c1 -> 2   c2 -> 0\n"
        "3       c2 -> 1   c0 -> 2   c1 -> 0\n"
    )


def test_says_that_nothing_has_to_move() -> None:
    assert picture(schedule.ring(1)) == "ring: 1 rank, 1 chunk\n\nno rounds: nothing has to move\n"


def test_an_empty_round_is_a_round() -> None:
    def rounds() -> Iterator[Round]:
        yield Round.of([], [], [], [], [])

    assert picture(Schedule("idle", 2, 1, rounds)).splitlines()[-1].split() == ["0", ".", "."]
