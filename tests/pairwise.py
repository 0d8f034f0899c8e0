"""``@pytest.mark.pairwise``: of a test's cases those that pair every two values of its parameters; the others are slow.

For tests whose parameters have nothing to do with each other. What goes wrong there goes wrong for one value, or for
two together, and cases for every two values are a fraction of all products. ``pytest -m slow`` runs the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest

Case = frozenset[tuple[str, int]]
"""What a case has: each parameter's name, and the identity of its value."""


def case_of(item: pytest.Item) -> Case:
    """Return what ``item`` has; ``callspec.indices`` would tell every case's values from every other's."""
    callspec = getattr(item, "callspec", None)
    return frozenset((name, id(value)) for name, value in callspec.params.items()) if callspec else frozenset()


def cover(cases: Iterable[Case]) -> list[int]:
    """Return which of ``cases`` have, between them, each value that any has, and each two that any has together.

    The first is always among them. The next is whichever has most that none before it has, the earliest of several:
    early cases differ most.
    """
    new = [{*combinations(case, 1), *map(frozenset, combinations(case, 2))} for case in cases]
    chosen: list[int] = []
    best = 0
    while new and (new[best] or not chosen):
        chosen.append(best)
        had = set(new[best])
        for others in new:
            others -= had
        best = max(range(len(new)), key=lambda number: len(new[number]))
    return chosen


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow those cases of tests marked ``pairwise`` that pair nothing new."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        kept = set(cover(map(case_of, cases)))
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.slow)
