"""``gossip``: ranks that mix with a few others come to the mean of all, as one process does with the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import pycomm
from pycomm import CommError
from pycomm.asynchronous.gossip import mixing_of, require_mixing
from tests.asynchronous.averaged import flat
from tests.asynchronous.runs import loss_of, model_of
from tests.on_ranks import Pools, on_ranks
from tests.survival.training import die

TIMEOUT = 110.0
STEPS = 9
# Each gives half to the next, and the last one gives a third to each of two: rows do not sum to 1.
DIRECTED = [[0.5, 0.0, 1 / 3], [0.5, 0.5, 1 / 3], [0.0, 0.5, 1 / 3]]
TOPOLOGIES: dict[str, Any] = {
    "ring": "ring",
    "exponential": "exponential",
    "random": "random",
    "directed": DIRECTED,
    "in turns": [np.eye(3).tolist(), DIRECTED],
}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("every", [1, 2])
@on_ranks(3, timeout=TIMEOUT)
def test_it_is_what_one_process_comes_to(topology: Any, every: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    handle = pycomm.gossip(optimizer, model, topology=topology, every=every, seed=5, timeout=60)
    weights_of = mixing_of(topology, size, 5)
    models = [model_of() for _ in range(size)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in models]
    biased, mass = torch.stack([flat(each) for each in models]), torch.ones(size, dtype=torch.float64)
    for step in range(STEPS):
        for number, (each, its) in enumerate(zip(models, optimizers, strict=True)):
            before = flat(each).clone()
            its.zero_grad()
            loss_of(each, number, step).backward()
            its.step()
            biased[number] += flat(each) - before
        if step % every == every - 1:
            weights = torch.from_numpy(weights_of(step // every))
            biased, mass = weights @ biased, weights @ mass
            for each, row, share in zip(models, biased, mass, strict=True):
                torch.nn.utils.vector_to_parameters(row / share, each.parameters())
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), flat(models[rank]), rtol=1e-11, atol=1e-11)
    handle.average()
    torch.testing.assert_close(flat(model), biased.mean(0), rtol=1e-11, atol=1e-11)
    stats = handle.stats()
    assert (stats["steps"], stats["mixings"]) == (STEPS, STEPS // every)
    assert stats["bytes_sent"] % (54 * 8) == 0
    handle.detach()


@pytest.mark.parametrize("topology", ["ring", "exponential", "random"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 12])
def test_named_topologies_leave_the_mean_and_reach_everybody(topology: str, size: int) -> None:
    mixing = mixing_of(topology, size, seed=1)
    rounds = np.stack([mixing(number) for number in range(60)])
    require_mixing(rounds)
    np.testing.assert_allclose(rounds.sum(axis=2), 1.0)
    mixed = np.linalg.multi_dot(list(rounds[::-1])) if size > 1 else rounds[0]
    np.testing.assert_allclose(mixed, 1 / size, atol=0.35 if topology == "ring" else 0.05)


@given(st.integers(2, 6), st.integers(0, 1000))
def test_random_weights_are_told_from_those_that_do_not_mix(size: int, seed: int) -> None:
    weights = np.random.default_rng(seed).random((size, size)) + np.eye(size)
    weights /= weights.sum(axis=0)
    require_mixing(weights[None])
    weights[0, 1:] = 0.0  # rank 0 hears of nobody
    with pytest.raises(ValueError, match=r"sum to|never hears"):
        require_mixing(weights[None])
    with pytest.raises(ValueError, match="rank 0 never hears of rank 1"):
        require_mixing(weights[None] / weights.sum(axis=0))


def make(options: dict[str, Any]) -> None:
    model = model_of()
    pycomm.gossip(torch.optim.SGD(model.parameters(), 0.1), model, timeout=60, **options).detach()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"topology": "star"}, "topology is 'star'"),
        ({"topology": [[0.5, 0.5], [0.4, 0.5]]}, "sum to 0.9 in matrix 0, wanted 1"),
        ({"topology": [[1.5, 0.5], [-0.5, 0.5]]}, "negative"),
        ({"topology": [[1.0, 0.0], [0.0, 1.0]]}, "rank 0 never hears of rank 1"),
        ({"topology": [[0.0, 1.0], [1.0, 0.0]]}, "keeps nothing of its own"),
        ({"topology": [[1.0]]}, "wanted weights of 2 by 2 ranks"),
        ({"topology": 3.0}, "wanted weights of 2 by 2 ranks"),
        ({"every": 0}, "every"),
    ],
)
def test_mistakes_are_told_to_all(rank_pools: Pools, options: dict[str, Any], problem: str) -> None:
    for outcome in rank_pools(2).outcomes(make, options, timeout=TIMEOUT):
        assert isinstance(outcome.error, ValueError), outcome.trace
        assert problem in str(outcome.error)


def lose_one() -> str:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    pycomm.gossip(optimizer, model, topology="ring", timeout=60)
    for step in range(6):
        if dist.get_rank() == 1 and step == 4:
            die()
        try:
            optimizer.step()
        except CommError as error:
            return str(error)
    return ""


def test_a_neighbour_that_dies_is_an_error(new_ranks: Pools) -> None:
    outcomes = new_ranks(3).outcomes(lose_one, timeout=TIMEOUT)
    assert "rank 1" in outcomes[0].result or "rank 2" in outcomes[0].result
    assert "rank 1" in outcomes[2].result or "rank 0" in outcomes[2].result
