"""verify is right about right and wrong tables.

What is right is decided a second time, in plain Python: sets of contributions with their numbers, place by
place, and the rule about conflicts edge by edge. Tables come from the algorithms, with mutations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycomm import schedule
from pycomm.schedule import COPY, REDUCE, Round, Schedule, ScheduleError
from pycomm.schedule.algorithms.circulant import circulant_all_gather, circulant_reduce_scatter
from pycomm.schedule.algorithms.halving_doubling import doubling_all_gather, halving_reduce_scatter
from pycomm.schedule.algorithms.rooted import binomial_broadcast, chain_reduce

Edge = tuple[int, int, int, int, int]  # src, dst, first chunk, count, op
END = "after the last round"
RIGHT = [
    *(schedule.by_name(name, ranks) for name in schedule.names() if name != "double_tree" for ranks in (2, 3, 4, 5, 6)),
    *(schedule.double_tree(ranks, pieces) for ranks, pieces in ((2, 1), (3, 2), (4, 1), (5, 3), (6, 2))),
    *(schedule.torus(4, 2, "halving_doubling"), schedule.hierarchical(2, 3, "binomial"), schedule.binary_blocks(7)),
    *(circulant_reduce_scatter(5), circulant_all_gather(6, 2), halving_reduce_scatter(4), doubling_all_gather(4)),
    *(chain_reduce(3), binomial_broadcast(5)),
]


def rounds_of(s: Schedule) -> list[list[Edge]]:
    return [list(r.edges()) for r in s.rounds()]


def table(like: Any, rounds: list[list[Edge]]) -> SimpleNamespace:
    """Anything with the three attributes will do; the columns are lists."""

    def columns() -> Iterator[tuple[list[int], ...]]:
        for edges in rounds:
            yield tuple(list(column) for column in zip(*edges, strict=True)) if edges else ([],) * 5

    claim = {"goal": like.goal, "owners": like.owners} if hasattr(like, "goal") else {}
    return SimpleNamespace(num_ranks=like.num_ranks, num_chunks=like.num_chunks, rounds=columns, **claim)


def what_is_wrong(like: Any, rounds: list[list[Edge]]) -> str | None:
    """Return how the message must begin; ``None`` if the table is right."""
    held = [[Counter({rank: 1}) for _ in range(like.num_chunks)] for rank in range(like.num_ranks)]
    for number, edges in enumerate(rounds):
        if not all(is_edge(like, edge) for edge in edges) or in_conflict(edges):
            return f"round {number}, edge "
        before = [[Counter(place) for place in rank] for rank in held]
        for src, dst, first, count, op in edges:
            for chunk in range(first, first + count):
                if op == COPY:
                    held[dst][chunk] = Counter(before[src][chunk])
                else:
                    held[dst][chunk].update(before[src][chunk])
    return None if reaches_goal(like, held) else END


def is_edge(like: Any, edge: Edge) -> bool:
    src, dst, first, count, op = edge
    in_range = all(0 <= rank < like.num_ranks for rank in (src, dst)) and 0 <= first < first + count <= like.num_chunks
    return in_range and src != dst and op in (COPY, REDUCE)


def in_conflict(edges: list[Edge]) -> bool:
    """Return whether a COPY writes a place that another edge reads or writes."""
    for this, (_, dst, first, count, op) in enumerate(edges):
        for other, (other_src, other_dst, other_first, other_count, _) in enumerate(edges):
            overlap = max(first, other_first) < min(first + count, other_first + other_count)
            if op == COPY and this != other and overlap and dst in (other_src, other_dst):
                return True
    return False


def reaches_goal(like: Any, held: list[list[Counter[int]]]) -> bool:
    everyone = Counter(range(like.num_ranks))
    goal = getattr(like, "goal", "all_reduce")
    if goal == "reduce_scatter":
        return all(held[owner][chunk] == everyone for chunk, owner in enumerate(like.owners))
    wanted = [everyone if goal == "all_reduce" else Counter([int(like.owners[c])]) for c in range(like.num_chunks)]
    return all(rank == wanted for rank in held)


def verdict(s: Any, **how: Any) -> str | None:
    try:
        schedule.verify(s, **how)
    except ScheduleError as error:
        return str(error)
    return None


def assert_agreement(like: Any, rounds: list[list[Edge]]) -> str | None:
    """Check that verify says the same in both modes, and return what it must say."""
    wanted = what_is_wrong(like, rounds)
    for exact in (True, False):
        got = verdict(table(like, rounds), exact=exact)
        if wanted is None:
            assert got is None
        else:
            assert got is not None, f"passes, but is wrong {wanted}"
            assert got.startswith(wanted), got
            assert "chunk" in got
    return wanted


def edges_of(rounds: list[list[Edge]]) -> list[tuple[int, int]]:
    return [(number, edge) for number, edges in enumerate(rounds) for edge in range(len(edges))]


def replaced(rounds: list[list[Edge]], at: tuple[int, int], *edges: Edge) -> list[list[Edge]]:
    number, edge = at
    changed = [list(r) for r in rounds]
    changed[number][edge : edge + 1] = edges
    return changed


@pytest.mark.parametrize("s", RIGHT, ids=lambda s: f"{s.name}-{s.num_ranks}")
def test_the_algorithms_by_both_checkers(s: Schedule) -> None:
    assert assert_agreement(s, rounds_of(s)) is None
    schedule.verify(s)
    assert verdict(s, exact=False, seed=7) is None


@pytest.mark.parametrize("s", [s for s in RIGHT if s.num_ranks <= 5], ids=lambda s: f"{s.name}-{s.num_ranks}")
def test_every_mutation_of_one_edge(s: Schedule) -> None:
    rounds = rounds_of(s)
    for at in edges_of(rounds)[:: 1 + len(edges_of(rounds)) // 25]:
        src, dst, chunk, count, op = edge = rounds[at[0]][at[1]]
        surely_wrong = [[], [edge, edge], [(src, dst, chunk, count, 1 - op)], [(src, dst, chunk, count, 7)]]
        surely_wrong += [[(src, src, chunk, count, op)], [(src, dst, chunk, count + s.num_chunks, op)]]
        surely_wrong += [[(src, dst, -1, count, op)], [(src, s.num_ranks, chunk, count, op)]]
        for edges in surely_wrong:
            assert assert_agreement(s, replaced(rounds, at, *edges)), f"{at}: {edge} -> {edges}"
        others = [((src + 1) % s.num_ranks, dst, chunk, count, op), (src, (dst + 1) % s.num_ranks, chunk, count, op)]
        others += [(dst, src, chunk, count, op), (src, dst, (chunk + 1) % s.num_chunks, count, op)]
        others += [(src, dst, chunk, count - 1, op), (src, dst, chunk, count + 1, op)]
        for other in others:
            assert_agreement(s, replaced(rounds, at, other))


@given(st.data())
@settings(max_examples=300)
def test_several_mutations(data: st.DataObject) -> None:
    s = data.draw(st.sampled_from(RIGHT))
    rounds = rounds_of(s)
    rank, chunk = st.integers(0, s.num_ranks - 1), st.integers(0, s.num_chunks - 1)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(edges_of(rounds) or [(0, 0)]))
        kind = data.draw(st.sampled_from(["swap", "later", "drop", "twice", *Round._fields]))
        other = data.draw(st.integers(0, len(rounds) - 1))
        if kind == "swap":
            rounds[at[0]], rounds[other] = rounds[other], rounds[at[0]]
        elif rounds[at[0]]:
            edge = rounds[at[0]][at[1]]
            new = {"src": rank, "dst": rank, "chunk": chunk, "count": chunk.map(lambda c: c + 1), "op": st.just(1)}
            if kind in new:
                field, value = Round._fields.index(kind), data.draw(new[kind])
                edge = (*edge[:field], value, *edge[field + 1 :])  # type: ignore[assignment]
            rounds = replaced(rounds, at, *([edge] * {"drop": 0, "later": 0, "twice": 2}.get(kind, 1)))
            if kind == "later":
                rounds[other].append(edge)
    assert_agreement(s, rounds)


@given(st.data())
@settings(max_examples=200)
def test_any_table(data: st.DataObject) -> None:
    """Among few ranks some of them are right, and many are legal up to a conflict."""
    like = SimpleNamespace(num_ranks=data.draw(st.integers(2, 4)), num_chunks=data.draw(st.integers(1, 3)))
    rank, chunk = st.integers(0, like.num_ranks - 1), st.integers(0, like.num_chunks - 1)
    edge = st.tuples(rank, rank, chunk, st.integers(1, 2), st.integers(0, 1)).filter(lambda e: is_edge(like, e))
    assert_agreement(like, data.draw(st.lists(st.lists(edge, max_size=4), max_size=4)))


TWO = SimpleNamespace(num_ranks=2, num_chunks=1)
THREE = SimpleNamespace(num_ranks=3, num_chunks=1)
LEGAL = {
    "an exchange: each place is sent and added to": (TWO, [[(0, 1, 0, 1, 1), (1, 0, 0, 1, 1)]]),
    "two into one place": (THREE, [[(1, 0, 0, 1, 1), (2, 0, 0, 1, 1)], [(0, 1, 0, 1, 0), (0, 2, 0, 1, 0)]]),
    "in the other order": (THREE, [[(2, 0, 0, 1, 1), (1, 0, 0, 1, 1)], [(0, 2, 0, 1, 0), (0, 1, 0, 1, 0)]]),
    "rounds without edges": (TWO, [[], [(0, 1, 0, 1, 1), (1, 0, 0, 1, 1)], []]),
}
CONFLICTS = {
    "copies that cross": (TWO, [[(0, 1, 0, 1, 0), (1, 0, 0, 1, 0)]], 0),
    "a copy over what is sent": (THREE, [[(1, 2, 0, 1, 1), (0, 1, 0, 1, 0)]], 1),
    "two copies": (THREE, [[(0, 1, 0, 1, 0), (2, 1, 0, 1, 0)]], 0),
    "a copy and a sum": (THREE, [[(0, 1, 0, 1, 1), (2, 1, 0, 1, 0)]], 1),
    "a sum and a copy": (THREE, [[(2, 1, 0, 1, 0), (0, 1, 0, 1, 1)]], 0),
    "the same copy twice": (TWO, [[(0, 1, 0, 1, 0), (0, 1, 0, 1, 0)]], 0),
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_one_round_may_do(name: str) -> None:
    assert assert_agreement(*LEGAL[name]) is None


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_one_round_may_not_do(name: str) -> None:
    like, rounds, edge = CONFLICTS[name]
    message = assert_agreement(like, rounds) and verdict(table(like, rounds))
    assert message is not None
    assert message.startswith(f"round 0, edge {edge} (COPY from")
    assert "), chunk 0: " in message


def test_messages() -> None:
    two = SimpleNamespace(num_ranks=2, num_chunks=5)
    assert verdict(table(two, [[(0, 1, 0, 5, 1)], [(0, 1, 3, 3, 1)]])) == (
        "round 1, edge 0 (REDUCE from 0 to 1, chunk 3, count 3): chunk + count is beyond the 5 chunks"
    )
    crossing = table(two, [[(0, 1, 0, 5, 1)], [(0, 1, 0, 1, 1), (0, 1, 1, 4, 0), (1, 0, 3, 2, 1)]])
    assert verdict(crossing) == (
        "round 1, edge 1 (COPY from 0 to 1, chunk 1, count 4), chunk 3: its round also reads that place"
    )
    one_way = table(two, [[(0, 1, 0, 5, 1)], [(1, 0, 0, 4, 0)]])
    assert verdict(one_way) == f"{END}, rank 0, chunk 4: wanted each contribution once; it has rank 1's not at all"
    assert verdict(one_way, exact=False) == (
        f"{END}, rank 0, chunk 4: wanted each contribution once; it has 1 contributions, or not those"
    )
    missing = table(binomial_broadcast(3), [])
    assert "wanted the contribution of its owner, once" in str(verdict(missing))


def times(factor: int) -> Iterator[Round]:
    """Among four ranks: everybody ends with rank 1's contribution ``factor`` times and each other's once."""

    def edge(src: int, dst: int, op: int) -> Round:
        return Round.of(src, dst, 0, 1, op)

    yield Round.of([2, 3], 0, 0, 1, REDUCE)
    yield edge(1, 2, COPY)
    while factor:
        if factor % 2:
            yield edge(2, 0, REDUCE)
        yield edge(2, 3, COPY)
        yield edge(3, 2, REDUCE)
        factor //= 2
    yield Round.of(0, [1, 2, 3], 0, 1, COPY)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("factor", [2, 2**50 - 27, 2**50 - 26, 2**52 + 1, 2**63 + 1, 2**64 + 1, 2**200 + 1])
def test_once_is_not_once_modulo_something(factor: int, exact: bool) -> None:
    four = {"num_ranks": 4, "num_chunks": 1}
    assert verdict(SimpleNamespace(**four, rounds=lambda: times(1)), exact=exact) is None
    assert verdict(SimpleNamespace(**four, rounds=lambda: times(factor)), exact=exact) is not None


def test_more_edges_into_a_place_than_64_bits_hold() -> None:
    def rounds() -> Iterator[Round]:
        *start, _, _, _, end = times(2**49)
        yield from start  # rank 2 now has 2^49 times rank 1's, of which rank 0 should not get 2^15
        yield Round.of([2] * 2**15, 0, 0, 1, REDUCE)
        yield Round.of(1, 0, 0, 1, REDUCE)
        yield end

    for exact in (True, False):
        assert verdict(SimpleNamespace(num_ranks=4, num_chunks=1, rounds=rounds), exact=exact) is not None
