"""Every algorithm for every number of ranks: right, and at the steps and bytes that its file promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pycomm import schedule
from pycomm.schedule import Schedule
from pycomm.schedule.algorithms import most_square
from pycomm.schedule.algorithms.circulant import circulant_all_gather, circulant_reduce_scatter
from pycomm.schedule.algorithms.direct import direct_all_gather, direct_reduce_scatter
from pycomm.schedule.algorithms.double_tree import trees_of
from pycomm.schedule.algorithms.halving_doubling import doubling_all_gather, halving_reduce_scatter
from pycomm.schedule.algorithms.hierarchical import GROUPS
from pycomm.schedule.algorithms.ring import ring_all_gather, ring_reduce_scatter
from pycomm.schedule.algorithms.rooted import binomial_broadcast, binomial_reduce, chain_broadcast, chain_reduce
from pycomm.schedule.algorithms.torus import ROWS

SMALL = range(1, 65)
SOME = [*range(1, 40), 63, 64, 65, 100, 127, 128, 129]
PHASES = [
    *(ring_reduce_scatter, ring_all_gather, circulant_reduce_scatter, circulant_all_gather),
    *(direct_reduce_scatter, direct_all_gather, chain_reduce, chain_broadcast, binomial_reduce, binomial_broadcast),
    *(halving_reduce_scatter, doubling_all_gather),
]
ONLY_POWERS = (halving_reduce_scatter, doubling_all_gather)
FLAT = [name for name in schedule.names() if name not in ("torus", "hierarchical")]


def floor_lg(ranks: int) -> int:
    return ranks.bit_length() - 1


def ceil_lg(ranks: int) -> int:
    return (ranks - 1).bit_length()


def is_power(ranks: int) -> bool:
    return ranks & (ranks - 1) == 0


def factors(ranks: int) -> list[int]:
    return [d for d in range(1, ranks + 1) if ranks % d == 0]


def assert_right(s: Schedule, exact: bool | None = None) -> None:
    try:
        schedule.verify(s, exact)
    except schedule.ScheduleError as error:
        pytest.fail(f"{s}: {error}")


def assert_named(s: Schedule) -> None:
    """Check that its name makes it again."""
    again = schedule.by_name(s.name, s.num_ranks)
    assert (again.name, again.num_ranks, again.num_chunks) == (s.name, s.num_ranks, s.num_chunks)


@pytest.mark.parametrize("name", schedule.names())
def test_names_are_right_for_every_number_of_ranks(name: str) -> None:
    for ranks in SMALL:
        s = schedule.by_name(name, ranks)
        assert s.num_ranks == ranks
        assert_right(s)
        assert_named(s)


def circulants(ranks: int) -> Iterator[Schedule]:
    for size in factors(ranks):
        for make in (schedule.circulant, circulant_reduce_scatter, circulant_all_gather):
            yield make(ranks, size)


def double_trees(ranks: int) -> Iterator[Schedule]:
    for pieces in (1, 2, 5):
        yield schedule.double_tree(ranks, pieces)


def tori(ranks: int) -> Iterator[Schedule]:
    for x in factors(ranks):
        for rows in ROWS:
            if rows != "halving_doubling" or is_power(x):
                yield schedule.torus(x, ranks // x, rows)
        yield schedule.torus(x, ranks // x, "circulant", schedule.binary_blocks)


def hierarchies(ranks: int) -> Iterator[Schedule]:
    for size in factors(ranks):
        for within in GROUPS:
            for across in (schedule.recursive_doubling, schedule.circulant):
                yield schedule.hierarchical(ranks // size, size, within, across)


@pytest.mark.parametrize("family", [circulants, double_trees, tori, hierarchies])
def test_parameters_are_right_for_every_number_of_ranks(family: Callable[[int], Iterator[Schedule]]) -> None:
    for ranks in SMALL:
        for s in family(ranks):
            assert s.num_ranks == ranks
            assert_right(s)
            if s.goal == "all_reduce":
                assert_named(s)


@pytest.mark.parametrize("phase", PHASES)
def test_phases_are_right_for_every_number_of_ranks(phase: Callable[[int], Schedule]) -> None:
    for ranks in SMALL:
        if phase not in ONLY_POWERS or is_power(ranks):
            s = phase(ranks)
            assert s.goal == ("all_gather" if "gather" in s.name or "broadcast" in s.name else "reduce_scatter")
            assert_right(s)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("ring", 65), ("ring", 500), ("direct", 65), ("direct", 500), ("torus", 1000), ("hierarchical", 1024)),
        *(("torus(16,64,circulant,ring)", 1024), ("hierarchical(64,64,binomial,double_tree)", 4096)),
        *(("circulant", 65), ("circulant", 1025), ("circulant(8)", 1000), ("halving_doubling", 1500)),
        *(("recursive_doubling", 4095), ("double_tree", 4096), ("double_tree(3)", 3001)),
    ],
)
def test_fingerprints_of_many_ranks(name: str, ranks: int) -> None:
    assert_right(schedule.by_name(name, ranks), exact=False)


@pytest.mark.parametrize(
    "ranks",
    [range(1, 350), *(pytest.param(rest, marks=pytest.mark.slow) for rest in (range(350, 700), range(700, 1026)))],
    ids=str,
)
def test_binary_blocks_of_up_to_1025_ranks(ranks: range) -> None:
    for number in ranks:
        assert_right(schedule.binary_blocks(number), exact=False)


@pytest.mark.parametrize("ranks", SOME)
def test_costs_of_ring_and_direct(ranks: int) -> None:
    share = (ranks - 1) / ranks
    for s, steps in ((schedule.ring(ranks), 2 * (ranks - 1)), (schedule.direct(ranks), 2 if ranks > 1 else 0)):
        stats = s.stats()
        assert stats.steps == steps
        assert stats.messages == 2 * (ranks - 1)
        assert (stats.critical, stats.max_sent, stats.max_received) == pytest.approx((2 * share,) * 3)
    for phase in (ring_reduce_scatter, ring_all_gather):
        assert phase(ranks).stats().steps == ranks - 1
        assert phase(ranks).stats().critical == pytest.approx(share)


@pytest.mark.parametrize("ranks", SOME)
def test_costs_of_doubling_and_folding(ranks: int) -> None:
    core = 1 << floor_lg(ranks)
    folds = core != ranks
    doubling, halving = schedule.recursive_doubling(ranks).stats(), schedule.halving_doubling(ranks).stats()
    assert doubling.steps == floor_lg(ranks) + 2 * folds
    assert doubling.critical == floor_lg(ranks) + 2 * folds
    assert halving.steps == 2 * floor_lg(ranks) + 2 * folds
    assert halving.critical == 2 * (core - 1) / core + 2 * folds
    if not folds:
        for phase in ONLY_POWERS:
            assert phase(ranks).stats().steps == floor_lg(ranks)
            assert phase(ranks).stats().critical == (ranks - 1) / ranks


@pytest.mark.parametrize("ranks", [range(1, 70), range(70, 201, 13), [255, 256, 257, 600, 1023, 1025]], ids=str)
def test_costs_of_circulant(ranks: Any) -> None:
    """Few steps and the ring's bytes for every number of ranks, which binary blocks lack."""
    for number in ranks:
        stats = schedule.circulant(number).stats()
        assert stats.steps == 2 * ceil_lg(number) <= 2 * floor_lg(number) + 3
        assert stats.critical == pytest.approx(2 * (number - 1) / number, rel=1e-12)
        assert stats.critical <= 2.2
        assert (stats.max_sent, stats.max_received) == pytest.approx((stats.critical,) * 2)
        assert stats.total == pytest.approx(2 * (number - 1))
        assert stats.messages <= 2 * stats.steps


def test_groups_cost_a_circulant_nothing() -> None:
    for ranks in (12, 48, 60):
        for size in factors(ranks):
            grouped, plain = schedule.circulant(ranks, size).stats(), schedule.circulant(ranks).stats()
            assert grouped.steps == plain.steps
            assert grouped.critical == pytest.approx(plain.critical)


@pytest.mark.parametrize("pieces", [1, 4, 16, 64])
def test_costs_of_double_tree(pieces: int) -> None:
    for ranks in range(2, 40):
        stats = schedule.double_tree(ranks, pieces).stats()
        assert stats.steps == 2 * floor_lg(ranks) + pieces - 1
        assert stats.total == 2 * (ranks - 1)
        assert max(stats.max_sent, stats.max_received) <= 2
        # A port carries 2n; the table's order leaves gaps between its four messages of a step.
        assert stats.critical <= 3.5 + 2 * floor_lg(ranks) / pieces


def test_a_rank_is_inner_in_at_most_one_tree() -> None:
    for ranks in range(1, 200):
        inner = [set(parent[parent >= 0].tolist()) for parent in trees_of(ranks)]
        assert inner[0].isdisjoint(inner[1])
        assert all((np.bincount(parent[parent >= 0], minlength=1) <= 2).all() for parent in trees_of(ranks))
        assert all(np.count_nonzero(parent < 0) == 1 for parent in trees_of(ranks))


@pytest.mark.parametrize(("x", "y"), [(1, 1), (1, 7), (7, 1), (2, 2), (4, 2), (3, 5), (8, 8), (16, 4)])
def test_costs_of_torus(x: int, y: int) -> None:
    rings = schedule.torus(x, y).stats()
    assert rings.steps == 2 * (x - 1) + 2 * (y - 1)
    assert rings.critical == pytest.approx(2 * (x - 1) / x + 2 / x * (y - 1) / y)
    assert rings.critical == pytest.approx(2 * (x * y - 1) / (x * y))
    circles = schedule.torus(x, y, "circulant", schedule.circulant).stats()
    assert circles.steps == 2 * ceil_lg(x) + 2 * ceil_lg(y)
    assert circles.critical == pytest.approx(rings.critical)
    assert schedule.torus(x, y, "direct", schedule.direct).stats().steps == 2 * (x > 1) + 2 * (y > 1)


@pytest.mark.parametrize(("groups", "size"), [(1, 1), (1, 6), (6, 1), (4, 4), (5, 3), (64, 16), (32, 32)])
def test_costs_of_hierarchical(groups: int, size: int) -> None:
    stats = schedule.hierarchical(groups, size).stats()
    assert stats.steps == 4 * (size - 1) + 2 * (groups - 1)
    if groups * size == 1024:
        assert stats.steps == 186
        assert schedule.ring(1024).stats().steps == 2046
    # A master hands over what the ring needs and, where there is a group, the result.
    if groups > 1:
        assert (stats.max_sent, stats.max_received) == pytest.approx((2 * (groups - 1) / groups + (size > 1),) * 2)
    short = schedule.hierarchical(groups, size, "binomial", schedule.recursive_doubling).stats()
    assert short.steps == 2 * ceil_lg(size) + schedule.recursive_doubling(groups).stats().steps


@pytest.mark.parametrize("ranks", SOME)
def test_costs_of_rooted_phases(ranks: int) -> None:
    for chain in (chain_reduce, chain_broadcast):
        stats = chain(ranks).stats()
        assert stats.steps == 2 * (ranks - 1)
        assert stats.critical == pytest.approx(2 * (ranks - 1) / ranks)
        assert stats.max_sent == pytest.approx(int(ranks > 1))
    for tree in (binomial_reduce, binomial_broadcast):
        assert tree(ranks).stats().steps == ceil_lg(ranks)
        assert tree(ranks).stats().critical == ceil_lg(ranks)
        assert tree(ranks).stats().total == ranks - 1


@pytest.mark.parametrize("name", schedule.names())
def test_stats_are_those_of_the_table(name: str) -> None:
    for ranks in (1, 2, 6, 12, 17):
        s = schedule.by_name(name, ranks)
        edges = [edge for r in s.rounds() for edge in r.edges()]
        sent, received, messages = ([0] * ranks for _ in range(3))
        for src, dst, _, count, _ in edges:
            sent[src] += count
            received[dst] += count
            messages[src] += 1
        stats = s.stats()
        assert stats is s.stats()
        assert (stats.steps, stats.messages) == (len(list(s.rounds())), max(messages))
        assert stats.total == pytest.approx(sum(sent) / s.num_chunks)
        assert stats["max_sent"] == pytest.approx(max(sent) / s.num_chunks)
        assert stats["max_received"] == pytest.approx(max(received) / s.num_chunks)
        assert stats["critical"] >= max(stats["max_sent"], stats["max_received"]) - 1e-12
        assert stats.total >= 2 * (ranks - 1) - 1e-9
        assert all(r.num_edges > 0 for r in s.rounds()), "a round without edges is no step"


def test_names() -> None:
    wanted = {"ring", "recursive_doubling", "halving_doubling", "binary_blocks", "double_tree", "torus", "hierarchical"}
    assert {*wanted, "direct"} <= set(schedule.names())
    assert len(set(schedule.names())) == len(schedule.names())
    assert all(schedule.by_name(name, 12).name.startswith(name) for name in schedule.names())
    for per_host in (1, 2, 3, 4, 6, 12):
        assert schedule.by_name("torus", 12, per_host).name == f"torus({per_host},{12 // per_host})"
        assert schedule.by_name("hierarchical", 12, per_host).name == f"hierarchical({12 // per_host},{per_host})"
    assert [most_square(ranks) for ranks in (1, 7, 12, 36, 1024)] == [1, 1, 3, 6, 32]
    assert schedule.by_name("torus(2,8,ring,hierarchical(2,4,binomial,circulant))", 16).num_ranks == 16
    assert repr(schedule.ring(3)) == "<schedule ring: all_reduce among 3 ranks, 3 chunks>"


@pytest.mark.parametrize("ranks", [0, -1, 1.5, 4.0, "4", None, True, math.nan, np.float64(4), [4]], ids=repr)
def test_a_number_of_ranks_that_is_none(ranks: Any) -> None:
    makers = [*PHASES, *(getattr(schedule, name) for name in FLAT)]
    makers += [lambda n, name=name: schedule.by_name(name, n) for name in schedule.names()]
    makers += [lambda n: schedule.torus(n, 2), lambda n: schedule.torus(2, n)]
    makers += [lambda n: schedule.hierarchical(n, 2), lambda n: schedule.hierarchical(2, n)]
    makers += [lambda n: schedule.circulant(4, n), lambda n: schedule.double_tree(4, n)]
    for make in makers:
        with pytest.raises(ValueError, match="wanted a whole number of at least 1"):
            make(ranks)


@pytest.mark.parametrize("name", schedule.names())
@pytest.mark.parametrize("ranks", [np.int64(12), np.int32(12), np.uint8(200)], ids=repr)
def test_a_number_of_ranks_of_numpy(name: str, ranks: Any) -> None:
    s = schedule.by_name(name, ranks)
    assert_right(s, exact=False)
    assert s.stats() == schedule.by_name(name, int(ranks)).stats()


MISTAKES = {
    ("nothing", 4): r"algorithm is 'nothing', wanted one of ring, .*binary_blocks.*torus, hierarchical",
    ("", 4): "wanted one of ring",
    (None, 4): "algorithm is None, wanted one of ring",
    ("ring(2)", 4): "ring takes none",
    ("circulant(2,2)", 4): "circulant takes one parameter",
    ("circulant(3)", 4): "group_size is 3, wanted a divisor of num_ranks, which is 4",
    ("circulant(0)", 4): "'0' is not a whole number of at least 1",
    ("circulant(x)", 4): "'x' is not a whole number of at least 1",
    ("circulant(²)", 4): "'²' is not a whole number of at least 1",
    ("double_tree(-1)", 4): "'-1' is not a whole number",
    ("torus(2)", 4): "wanted two factors",
    ("torus(2,2,ring)", 4): "wanted two factors, and after them nothing or two names",
    ("torus(2,3)", 4): "2 x 3 is not 4, the number of ranks",
    ("torus(2,2,nothing,ring)", 4): "rows is 'nothing', wanted one of ring, halving_doubling, circulant, direct",
    ("torus(2,2,ring,nothing)", 4): "algorithm is 'nothing', wanted one of ring",
    ("torus(3,2,halving_doubling,ring)", 6): "num_ranks is 3, wanted a power of two",
    ("hierarchical(2,2,ring,ring)", 4): "within is 'ring', wanted one of chain, binomial",
    ("hierarchical(4,4)", 4): "4 x 4 is not 4",
}


@pytest.mark.parametrize(("name", "ranks"), MISTAKES)
def test_mistakes(name: Any, ranks: int) -> None:
    with pytest.raises(ValueError, match=MISTAKES[name, ranks]):
        schedule.by_name(name, ranks)


@pytest.mark.parametrize("name", ["torus", "hierarchical"])
def test_hosts_that_do_not_factor_the_ranks(name: str) -> None:
    for per_host, why in (
        (5, "12 ranks do not factor into groups of 5"),
        (0, "per_host is 0"),
        (1.5, "per_host is 1.5"),
    ):
        with pytest.raises(ValueError, match=why):
            schedule.by_name(name, 12, per_host)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase", ONLY_POWERS)
@pytest.mark.parametrize("ranks", [3, 6, 12])
def test_halving_of_other_than_powers_of_two(phase: Callable[[int], Schedule], ranks: int) -> None:
    with pytest.raises(ValueError, match=f"num_ranks is {ranks}, wanted a power of two"):
        phase(ranks)


def test_names_within_names_within_names() -> None:
    inner = schedule.torus(4, 4, columns=lambda n: schedule.torus(2, 2, columns=lambda m: schedule.circulant(m, 2)))
    assert inner.name == "torus(4,4,ring,torus(2,2,ring,circulant(2)))"
    assert_named(inner)
    assert_right(inner)
