"""A little of the fuzz in every run, and proof that it can fail. At length: ``python -m tests.transport.fuzz``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.on_ranks import Pools
from tests.transport.fuzz import GROUPS, Failure, Group
from tests.transport.fuzz_cases import Case, draw
from tests.transport.fuzz_oracle import Report, judge

CALLS = 300
SEED = 1


def fuzz(group: Group, numbers: range) -> list[Failure]:
    """The failures among these calls."""
    found = [group.call(SEED, number) for number in numbers]
    return [failure for failure in found if failure is not None]


def numbers_of(size: int, transport: str, calls: int) -> range:
    """Return the numbers of the calls that ``python -m tests.transport.fuzz`` gives to this group."""
    return range(GROUPS.index((size, transport)), calls * len(GROUPS), len(GROUPS))


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("size", "transport"), GROUPS)
def test_random_calls(rank_pools: Pools, size: int, transport: str) -> None:
    group = Group(rank_pools, size, transport)
    for number in numbers_of(size, transport, CALLS):
        failure = group.call(SEED, number)
        assert failure is None, f"\n{failure}"
    group.close()


@pytest.mark.parametrize(
    ("sabotage", "says"),
    [
        ("result", "wrong, first at"),
        ("guard", "memory changed that must not"),
        ("class", "raised RuntimeError"),
        ("names nobody", "names nobody who is to blame"),
        ("silent", "alone of 2"),
    ],
)
def test_the_oracle_notices(rank_pools: Pools, sabotage: str, says: str) -> None:
    group = Group(rank_pools, 2, "shared_memory", sabotage=sabotage)
    failures = fuzz(group, numbers_of(2, "shared_memory", 60))
    group.close()
    assert any(says in problem for failure in failures for problem in failure.problems)


def case_where(condition: Callable[[Case], bool]) -> Case:
    """The first call of shared memory that ``condition`` holds for."""
    return next(case for n in range(10_000) if condition(case := draw(SEED, n, 2, "shared_memory")))


def guilt(case: Case) -> list[str]:
    return [plan.guilt for plan in case.plans]


RIGHT = case_where(lambda case: guilt(case) == ["no", "no"] and not case.disagree and "x" in case.plans[0].arrays)
WRONG = case_where(lambda case: guilt(case) == ["no", "sure"])
MINE = Report(error=("TypeError", "Exception"), text="x is a list, wanted a torch tensor")
THEIRS = Report(error=("ValueError", "Exception"), text="all_reduce: rank 1 could not take part: x is a list")


@pytest.mark.parametrize(
    ("case", "reports", "says"),
    [
        (RIGHT, [Report(), Report()], ""),
        (RIGHT, [Report(digest="a"), Report(digest="b")], "different bits"),
        (RIGHT, [Report(), Report(problems=["x: 3 wrong"])], "rank 1: x: 3 wrong"),
        (RIGHT, [Report(), Report(seconds=19.0)], "rank 1: took 19.0 s"),
        (RIGHT, [THEIRS, MINE], "was refused"),
        (WRONG, [THEIRS, MINE], ""),
        (WRONG, [Report(), Report()], "was accepted"),
        (WRONG, [Report(), MINE], "raised on rank 1 alone"),
        (WRONG, [replace(THEIRS, text="rank 0 could not take part"), MINE], "names nobody"),
        (WRONG, [replace(THEIRS, error=("TypeError",)), MINE], "innocent"),
        (WRONG, [THEIRS, replace(MINE, error=("CommError", "RuntimeError"))], "raised CommError"),
        (WRONG, [THEIRS, replace(MINE, error=("UnicodeDecodeError", "UnicodeError", "ValueError"))], "raised Unicode"),
        (WRONG, [THEIRS, replace(MINE, text="f(): incompatible function arguments")], "not meant for users"),
    ],
)
def test_what_the_ranks_say_side_by_side(case: Case, reports: list[Report], says: str) -> None:
    found = judge(case, reports)
    assert any(says in problem for problem in found) if says else not found, found


def test_the_same_seed_means_the_same_calls() -> None:
    for size, transport in GROUPS:
        for number in range(200):
            assert str(draw(SEED, number, size, transport)) == str(draw(SEED, number, size, transport))
