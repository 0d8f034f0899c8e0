"""Which cases of a test with independent parameters CI runs, and which are slow."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import Case, case_of, cover, mark_slow


def cases_of(*sizes: int) -> list[Case]:
    return [frozenset((f"p{n}", value) for n, value in enumerate(values)) for values in product(*map(range, sizes))]


def pairs(cases: list[Case]) -> set[frozenset[tuple[str, int]]]:
    return {frozenset(pair) for case in cases for pair in combinations(case, 2)}


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_every_two_values_meet_that_meet_at_all(sizes: list[int], data: st.DataObject) -> None:
    """In full products, and in products with cases left out."""
    every = cases_of(*sizes)
    some = data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1))
    for cases in (every, some):
        chosen = cover(cases)
        kept = [cases[number] for number in chosen]
        assert len(set(chosen)) == len(chosen)
        assert pairs(kept) == pairs(cases)
        assert frozenset().union(*kept) == frozenset().union(*cases)
        assert chosen == cover(cases)
        assert chosen[0] == 0


@pytest.mark.parametrize(
    ("sizes", "most"), [((4,), 4), ((3, 4), 12), ((2, 2, 2), 5), ((3, 3, 3), 9), ((4, 4, 3, 2), 18), ((2,) * 10, 10)]
)
def test_few_cases_are_enough(sizes: tuple[int, ...], most: int) -> None:
    assert len(cover(cases_of(*sizes))) <= most


def test_nothing_of_nothing() -> None:
    assert cover([]) == []
    assert cover([frozenset()]) == [0]


SOURCE = """
import pytest

@pytest.mark.pairwise
@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize(("b", "c"), [(1, 2), (1, 3), (4, 2), (4, 3)])
def test_pairs(a, b, c): pass

@pytest.mark.parametrize("a", "xyz")
@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("c", [2, 3])
def test_products(a, b, c): pass

@pytest.mark.pairwise
def test_alone(): pass
"""


class Collected:
    """Plugin that keeps the items collected by a nested run of pytest."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_slow(items)
        self.items = list(items)


def test_the_others_are_slow(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pairwise")
    (folder / "test_some.py").write_text(SOURCE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    pairwise: x\n    slow: x\n")
    plugin = Collected()
    words = ["--collect-only", "-p", "no:cacheprovider", "-p", "no:terminal", f"--rootdir={folder}"]
    assert pytest.main([*words, "-c", str(folder / "pytest.ini"), str(folder)], plugins=[plugin]) == 0
    kept = [item for item in plugin.items if item.get_closest_marker("slow") is None]
    names = [item.name.partition("[")[0] for item in kept]
    assert {name: names.count(name) for name in names} == {"test_pairs": 6, "test_products": 12, "test_alone": 1}
    of_pairs = [
        [case_of(item) for item in items if item.name.startswith("test_pairs")] for items in (kept, plugin.items)
    ]
    assert pairs(of_pairs[0]) == pairs(of_pairs[1])
