"""``@pytest.mark.pairwise``: cases of a test that cover all pairs of parameter values; its other cases become slow.

For tests with independent parameters. An error there depends on one value, or on two together, and covering all pairs
takes a fraction of all combinations. ``pytest -m slow`` runs the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest

Case = frozenset[tuple[str, int]]
"""Values of a case: each parameter's name, and the identity of its value."""


def case_of(item: pytest.Item) -> Case:
    """Return the values of ``item``. ``callspec.indices`` would not do: they differ between cases with equal values."""
    callspec = getattr(item, "callspec", None)
    return frozenset((name, id(value)) for name, value in callspec.params.items()) if callspec else frozenset()


def cover(cases: Iterable[Case]) -> list[int]:
    """Return indices of ``cases`` that cover all their values, and all their pairs of values.

    The first case is always chosen. Each next one covers the most values and pairs that are not covered yet; of
    several, it is the earliest, since early cases differ most.
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
    """Mark cases of ``pairwise`` tests as slow if they cover no new pair."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        kept = set(cover(map(case_of, cases)))
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker(pytest.mark.slow)
