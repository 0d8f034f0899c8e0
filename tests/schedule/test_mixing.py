"""Mixing is what its name says, and verify is right about right and wrong weights: numpy decides a second time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import schedule
from pycomm.schedule import COPY, REDUCE, Mixing, Round, ScheduleError, WeightedRound
from pycomm.schedule.mixing import TOPOLOGIES

Floats = npt.NDArray[np.float64]
SIZES = range(1, 17)
# Each gives half to the next, and the last one gives a third to each of two: rows do not sum to 1.
DIRECTED = [[0.5, 0.0, 1 / 3], [0.5, 0.5, 1 / 3], [0.0, 0.5, 1 / 3]]


def matrix_of(r: WeightedRound) -> Floats:
    """Return ``w[i, j]``: what rank i takes of rank j's."""
    matrix = np.diag(r.kept)
    for (src, dst, *_), weight in zip(r.messages.edges(), r.weights, strict=True):
        matrix[dst, src] += weight
    return matrix


def verdict(table: Any) -> str | None:
    """Return what is wrong; any other exception fails the test."""
    try:
        schedule.verify(table)
    except ScheduleError as error:
        return str(error)
    return None


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size", SIZES)
def test_named_topologies_are_proven_and_mix(topology: str, size: int) -> None:
    mixing = schedule.mixing(topology, size, seed=1)
    assert mixing.doubly_stochastic
    schedule.verify(mixing)
    matrices = [matrix_of(r) for r in mixing.rounds()]
    for matrix in matrices:
        np.testing.assert_allclose([matrix.sum(axis=0), matrix.sum(axis=1)], 1.0, rtol=1e-12)
    together = np.linalg.multi_dot([*matrices[::-1], np.eye(size), np.eye(size)])
    mixed = np.linalg.matrix_power(together, math.ceil(2000 / len(matrices)))
    np.testing.assert_allclose(mixed, 1 / size, atol=1e-9)


def test_what_the_names_mean() -> None:
    third, half = 1 / 3, 0.5
    ring = [[third, third, 0, third], [third, third, third, 0], [0, third, third, third], [third, 0, third, third]]
    np.testing.assert_array_equal(matrix_of(schedule.mixing("ring", 4).round_at(7)), ring)
    one = [[half, 0, 0, half], [half, half, 0, 0], [0, half, half, 0], [0, 0, half, half]]
    two = [[half, 0, half, 0], [0, half, 0, half], [half, 0, half, 0], [0, half, 0, half]]
    exponential = schedule.mixing("exponential", 4)
    np.testing.assert_array_equal([matrix_of(exponential.round_at(n)) for n in range(4)], [one, two, one, two])
    for topology in TOPOLOGIES:
        both = np.full((2, 2), 0.5)
        np.testing.assert_array_equal(matrix_of(schedule.mixing(topology, 2).round_at(0)), both, topology)
        np.testing.assert_array_equal(matrix_of(schedule.mixing(topology, 1).round_at(0)), [[1.0]], topology)


@pytest.mark.parametrize("size", SIZES)
def test_random_rounds_are_pairs_and_an_odd_rank_sits_out(size: int) -> None:
    mixing = schedule.mixing("random", size, seed=size)
    out = set()
    for r in mixing.rounds():
        partners = dict(zip(r.messages.src.tolist(), r.messages.dst.tolist(), strict=True))
        assert len(partners) == r.messages.num_edges == size // 2 * 2
        assert all(partners[partners[rank]] == rank != partners[rank] for rank in partners)
        assert all(r.kept[rank] == (0.5 if rank in partners else 1.0) for rank in range(size))
        out |= set(range(size)) - set(partners)
    assert out == (set(range(size)) if size % 2 else set())
    again, other = schedule.mixing("random", size, seed=size), schedule.mixing("random", size, seed=size + 1)
    assert again.name == mixing.name != other.name
    assert size < 3 or [r.messages.dst.tolist() for r in other.rounds()] != [
        r.messages.dst.tolist() for r in mixing.rounds()
    ]


def test_weights_of_ones_own_are_kept_as_they_are() -> None:
    mixing = schedule.mixing([np.eye(3), DIRECTED], 3)
    np.testing.assert_array_equal([matrix_of(r) for r in mixing.rounds()], [np.eye(3), DIRECTED])
    schedule.verify(mixing)
    assert mixing.name == schedule.mixing(np.array([np.eye(3), DIRECTED]), 3).name  # type: ignore[arg-type]
    assert mixing.name != schedule.mixing([DIRECTED, np.eye(3)], 3).name


def test_each_rank_has_its_part_of_a_round() -> None:
    r = schedule.mixing(DIRECTED, 3).round_at(0)
    assert r.part_of(0) == ([1], 0.5, [(2, 1 / 3)])
    assert r.part_of(1) == ([2], 0.5, [(0, 0.5), (2, 1 / 3)])
    assert r.part_of(2) == ([0, 1], 1 / 3, [(1, 0.5)])


def is_right(matrices: Floats, doubly: bool) -> bool:
    """Decide by matrices, of zeros and of weights well above the verifier's tolerance."""
    sums = [matrices.sum(axis=1), *([matrices.sum(axis=2)] if doubly else [])]
    if not np.allclose(sums, 1, rtol=0, atol=1e-9) or (np.diagonal(matrices, axis1=1, axis2=2) <= 0).any():
        return False
    heard = np.eye(matrices.shape[1])
    for matrix in [*matrices] * matrices.shape[1]:
        heard = np.sign(matrix @ heard)
    return bool((matrices >= 0).all() and heard.all())


@given(st.integers(1, 6), st.integers(1, 3), st.floats(0, 1), st.booleans(), st.integers(0, 2**32 - 1))
def test_any_weights(size: int, turns: int, density: float, doubly: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrices = rng.random((turns, size, size)) * (rng.random((turns, size, size)) < density) + np.eye(size)
    if doubly and rng.random() < 0.7:
        order = [rng.permutation(size) for _ in range(turns)]
        share = rng.random(turns)[:, None, None] / 2
        matrices = (1 - share) * np.eye(size) + share * np.array([np.eye(size)[o] for o in order])
    matrices /= matrices.sum(axis=1, keepdims=True)
    mutation = rng.integers(0, 4)
    at = tuple(rng.integers(0, matrices.shape))
    if mutation == 1:
        matrices[at] += 0.01
    elif mutation == 2:
        matrices[at] *= -1
    given = schedule.mixing(matrices, size)  # type: ignore[arg-type]
    mixing = Mixing(given.name, size, given.turn, doubly)
    assert (verdict(mixing) is None) == is_right(matrices, doubly), matrices


RIGHT = WeightedRound.of([0, 1], [1, 0], 0.5, [0.5, 0.5])


def table(*rounds: Any, num_ranks: int = 2, **claims: Any) -> SimpleNamespace:
    rest = {"num_chunks": 1, "goal": "mixing"} | claims
    return SimpleNamespace(num_ranks=num_ranks, rounds=lambda: rounds, **rest)


def messages(*edges: tuple[int, ...]) -> Round:
    return Round.of(*(np.array(column) for column in zip(*edges, strict=True)))


WRONG: dict[str, dict[str, Any]] = {
    "what rank 1 keeps and sends sums to 0.9, wanted 1": {"kept": [0.5, 0.4]},
    "what rank 0 keeps and sends sums to 1.00000003, wanted 1": {"kept": [0.50000003, 0.5]},
    "what rank 0 keeps and sends sums to inf, wanted 1": {"weights": [math.inf, 0.5]},
    "edge 1 (REDUCE from 1 to 0, chunk 0, count 1): its weight is not positive": {"weights": [0.5, -0.5]},
    "edge 0 (REDUCE from 0 to 1, chunk 0, count 1): its weight is not positive": {"weights": [1e-12, 0.5]},
    "chunk 0, count 1): its weight is not positive, above 1e-09": {"weights": [math.nan, 0.5]},
    "rank 1 keeps 0 of its own, wanted a positive weight": {"kept": [0.5, 0.0]},
    "rank 0 keeps nan of its own, wanted a positive weight": {"kept": [math.nan, 0.5]},
    "a rank sends to itself": {"messages": messages((0, 1, 0, 1, REDUCE), (1, 1, 0, 1, REDUCE))},
    "dst is not in 0 ... 1": {"messages": messages((0, 1, 0, 1, REDUCE), (1, 2, 0, 1, REDUCE))},
    "src is not in 0 ... 1": {"messages": messages((-1, 1, 0, 1, REDUCE), (1, 0, 0, 1, REDUCE))},
    "op must be REDUCE": {"messages": messages((0, 1, 0, 1, COPY), (1, 0, 0, 1, REDUCE))},
    "weights has shape [3], wanted 2 numbers": {"weights": [0.5] * 3},
    "kept has shape [], wanted 2 numbers": {"kept": 0.5},
    "kept is ['a', 'b'], wanted a column of numbers": {"kept": ["a", "b"]},
}


@pytest.mark.parametrize("problem", WRONG)
def test_what_is_wrong_with_a_round(problem: str) -> None:
    assert verdict(table(RIGHT, RIGHT)) is None
    message = verdict(table(RIGHT, RIGHT._replace(**WRONG[problem]))) or ""
    assert message.startswith("round 1")
    assert problem in message


def test_who_never_hears_of_whom() -> None:
    """Two of three ranks communicate; or all, but one only tells and is told nothing."""
    pair = WeightedRound.of([0, 1], [1, 0], 0.5, [0.5, 0.5, 1.0])
    never = "with these weights rank {} never hears of rank {}: not within 3 turns"
    assert never.format(0, 2) in str(verdict(table(pair, num_ranks=3)))
    tells = WeightedRound.of([0, 1, 2], [1, 0, 0], 0.5, np.full(3, 0.5))
    assert never.format(2, 0) in str(verdict(table(tells, num_ranks=3)))
    assert verdict(table(pair, tells, WeightedRound.of([0], [2], 0.5, [0.5, 1, 1]), num_ranks=3)) is None


def test_a_line_needs_all_its_turns() -> None:
    """Whoever tells only the next can reach the last one of n in n - 1 turns, and a turn may be of several rounds."""
    size = 7
    line = WeightedRound.of(range(size - 1), range(1, size), 0.5, [0.5] * (size - 1) + [1.0])
    back = WeightedRound.of([size - 1], [0], 0.5, [1.0] * (size - 1) + [0.5])
    assert verdict(table(line, back, num_ranks=size)) is None
    assert "rank 0 never hears of rank 1" in str(verdict(table(line, num_ranks=size)))


def test_claims() -> None:
    directed = schedule.mixing(DIRECTED, 3)
    assert not directed.doubly_stochastic
    message = str(verdict(Mixing("claims too much", 3, directed.turn, doubly_stochastic=True)))
    assert message.startswith("round 0: what rank 0 keeps and is sent sums to 0.833333333333, wanted 1, as this claims")
    assert "no rounds" in str(verdict(table()))
    assert "2 chunks" in str(verdict(table(RIGHT, num_chunks=2)))
    assert "at most 5792" in str(verdict(table(RIGHT, num_ranks=6000)))
    assert "wanted five columns" in str(verdict(table((None, [0.5], [1.0, 1.0]))))
    assert "round 0 is 5, wanted messages, weights, kept" in str(verdict(table(5)))


@pytest.mark.parametrize("topology", [[[1.0]], 3.0, [], np.zeros((0, 2, 2)), np.zeros((1, 1, 2, 2))], ids=repr)
def test_shapes_that_are_none(topology: Any) -> None:
    with pytest.raises(ValueError, match="wanted weights of 2 by 2 ranks"):
        schedule.mixing(topology, 2)


def test_topologies_that_are_none() -> None:
    with pytest.raises(ValueError, match="topology is 'star', wanted one of ring, exponential, random, or weights"):
        schedule.mixing("star", 2)
    with pytest.raises(TypeError, match="neither a name nor weights"):
        schedule.mixing([["a", "b"], ["c", "d"]], 2)
    with pytest.raises(ValueError, match="num_ranks is 0"):
        schedule.mixing("ring", 0)


def test_goals_are_not_mistaken_for_each_other() -> None:
    assert "round 0 is Round" in str(verdict(table(*schedule.ring(2).rounds())))
    assert "round 0 has 3 columns" in str(verdict(SimpleNamespace(num_ranks=2, num_chunks=1, rounds=lambda: [RIGHT])))
