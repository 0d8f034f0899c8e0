"""``gossip``: ranks that mix with a few others come to the mean of all, as one process does with the same weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import CommError, schedule
from pycomm.training.asynchronous import gossip as module
from tests.asynchronous.averaged import flat
from tests.asynchronous.runs import loss_of, model_of
from tests.on_ranks import Pools, on_ranks
from tests.schedule.test_mixing import DIRECTED, matrix_of
from tests.survival.training import die

TIMEOUT = 110.0
STEPS = 9
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
    mixing = schedule.mixing(topology, size, 5)
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
            weights = torch.from_numpy(matrix_of(mixing.round_at(step // every)))
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
    assert stats["bytes_sent"] == 54 * 8 * sum(
        len(mixing.round_at(number).part_of(rank)[0]) for number in range(STEPS // every)
    )
    handle.detach()
    for gone in (handle.mix, handle.average):
        with pytest.raises(RuntimeError, match="detached"):
            gone()


@on_ranks(3, timeout=TIMEOUT)
def test_a_model_larger_than_what_may_be_buffered_is_mixed_in_segments() -> None:
    """The last segment is a short one, in float32 and in float64."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SEGMENT_BYTES", 4096)
        patch.setenv("PYCOMM_BUFFER_BYTES", "40000")
        for dtype in (torch.float32, torch.float64):
            model = torch.nn.Linear(123, 457).to(dtype)
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            handle = pycomm.gossip(optimizer, model, topology="ring", timeout=60)
            start = flat(model).clone()
            for p in model.parameters():
                p.grad = torch.full_like(p, -rank)
            optimizer.step()
            torch.testing.assert_close(flat(model), start + (size - 1) / 2)
            handle.detach()


@pytest.mark.slow
@on_ranks(3, timeout=TIMEOUT)
def test_thirds_in_float32_make_no_drift() -> None:
    """Rounded, three thirds are more than 1, and 1 + 3e-8 to the power of 20,000 would show."""
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    handle = pycomm.gossip(optimizer, model, topology="ring", timeout=60)
    for _ in range(20_000):
        handle.mix()
    torch.testing.assert_close(model.weight, torch.ones(1, 3), rtol=0, atol=1e-5)
    handle.average()
    torch.testing.assert_close(model.weight, torch.ones(1, 3), rtol=0, atol=1e-5)
    handle.detach()


def make(options: dict[str, Any]) -> None:
    model = model_of(options.pop("dtype", torch.float64))
    pycomm.gossip(torch.optim.SGD(model.parameters(), 0.1), model, timeout=60, **options).detach()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"topology": "star"}, "topology is 'star'"),
        ({"topology": [[0.5, 0.5], [0.4, 0.5]]}, "round 0: what rank 0 keeps and sends sums to 0.9, wanted 1"),
        ({"topology": [[1.5, 0.5], [-0.5, 0.5]]}, "round 0, edge 1 (REDUCE from 0 to 1, chunk 0, count 1): its weight"),
        ({"topology": [[1.0, 0.0], [0.0, 1.0]]}, "rank 0 never hears of rank 1"),
        ({"topology": [[0.0, 1.0], [1.0, 0.0]]}, "round 0: rank 0 keeps 0 of its own"),
        ({"topology": [[1.0]]}, "wanted weights of 2 by 2 ranks"),
        ({"topology": 3.0}, "wanted weights of 2 by 2 ranks"),
        ({"every": 0}, "every"),
        ({"dtype": torch.float16}, "parameters are torch.float16 on cpu, wanted all float32 or all float64"),
    ],
)
def test_mistakes_are_told_to_all(rank_pools: Pools, options: dict[str, Any], problem: str) -> None:
    for outcome in rank_pools(2).outcomes(make, options, timeout=TIMEOUT):
        assert isinstance(outcome.error, ValueError), outcome.trace
        assert problem in str(outcome.error)


def make_different(options: list[dict[str, Any]]) -> None:
    make(options[dist.get_rank()])


LARGE = np.full((400, 2, 2), 0.5)
OTHER = LARGE.copy()
OTHER[200] = [[0.75, 0.25], [0.25, 0.75]]
DIFFERENT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "mistaken": ([{"topology": "ring"}, {"topology": "star"}], "topology is 'star'"),
    "topology": ([{"topology": "ring"}, {"topology": "exponential"}], "topology=exponential"),
    "seed": ([{"topology": "random", "seed": seed} for seed in (1, 2)], "topology=random(seed=2)"),
    "weights that numpy prints alike": ([{"topology": LARGE}, {"topology": OTHER}], "digest"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_differences_are_told_to_all(rank_pools: Pools, name: str) -> None:
    options, problem = DIFFERENT[name]
    for outcome in rank_pools(2).outcomes(make_different, options, timeout=TIMEOUT):
        assert isinstance(outcome.error, ValueError), outcome.trace
        assert problem in str(outcome.error)


def lose_one(topology: str, noticed: Path) -> list[str]:
    """Return what two steps raise. Between them, a rank waits until all that are left have noticed."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = pycomm.gossip(optimizer, model, topology=topology, timeout=60)
    problems: list[str] = []
    for step in range(40):
        if dist.get_rank() == 1 and step == 4:
            die()
        try:
            optimizer.step()
        except CommError as error:
            problems.append(str(error))
            if len(problems) == 2:
                break
            (noticed / str(dist.get_rank())).touch()
            wait_until(lambda: len(list(noticed.iterdir())) == dist.get_world_size() - 1, 30.0)
    handle.detach()
    return problems


def wait_until(there: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "not all ranks have noticed"
        time.sleep(0.01)


@pytest.mark.parametrize("topology", ["ring", "exponential", "random"])
def test_a_rank_that_dies_is_an_error_to_all_in_turn(new_ranks: Pools, topology: str, tmp_path: Path) -> None:
    """Those that have no messages with it in that round get one from those that have; and it stays an error."""
    outcomes = new_ranks(5).outcomes(lose_one, topology, tmp_path, timeout=TIMEOUT)
    for rank in (0, 2, 3, 4):
        assert outcomes[rank].error is None, outcomes[rank].trace
        first, second = outcomes[rank].result
        assert "rank " in first
        assert "closed" in second


def spoil(topology: str, value: float, where: str) -> tuple[str, bool]:
    """Return the error of this rank, and whether its parameters are finite, if rank 1's once are not."""
    rank, model = dist.get_rank(), cast(Any, model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = pycomm.gossip(optimizer, model, topology=topology, every=1, timeout=20)
    error = ""
    try:
        for step in range(12):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if rank == 1 and step == 5:
                with torch.no_grad():
                    (model[2].bias if where == "parameter" else model[2].bias.grad)[1] = value
            optimizer.step()
    except RuntimeError as problem:
        error = str(problem)
    handle.detach()
    return error, all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("topology", ["ring", "exponential", "random"])
@pytest.mark.parametrize(("value", "where"), [(float("nan"), "parameter"), (float("inf"), "gradient")])
def test_what_is_not_finite_spreads_to_no_other_rank(new_ranks: Pools, topology: str, value: float, where: str) -> None:
    told = new_ranks(4).run(spoil, topology, value, where, timeout=TIMEOUT)
    for rank, (error, is_finite) in enumerate(told):
        assert "'2.bias' is not finite on rank 1" in error
        assert is_finite == (rank != 1)


@on_ranks(3, timeout=TIMEOUT)
def test_a_mean_of_what_is_not_finite_is_an_error_on_all_ranks_and_changes_nothing() -> None:
    rank, model = dist.get_rank(), cast(Any, model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = pycomm.gossip(optimizer, model, every=100, timeout=60)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    kept = flat(model).clone()
    with torch.no_grad():
        model[0].weight[1, 1] = float("inf") if rank == 2 else 1.0
    before = flat(model).clone()
    with pytest.raises(RuntimeError, match="no mean: '0.weight' is not finite on rank 2"):
        handle.average()
    assert torch.equal(flat(model), before)
    torch.nn.utils.vector_to_parameters(kept, model.parameters())  # mended
    handle.average()
    everyones = [torch.empty_like(kept) for _ in range(3)]
    dist.all_gather(everyones, kept)
    torch.testing.assert_close(flat(model), torch.stack(everyones).mean(0), rtol=1e-12, atol=1e-12)
    handle.detach()


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_numbers_too_large_to_be_mixed_stay_as_they_are() -> None:
    """Push-sum adds what a rank gets of others before it divides."""
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, 3e38)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    handle = pycomm.gossip(optimizer, model, topology=[[0.9, 0.6], [0.1, 0.4]], timeout=20)
    problem = ""
    for _ in range(4):
        try:
            handle.mix()
        except RuntimeError as error:
            problem = problem or str(error)
    assert "'weight' is finite, but too large to be mixed on rank 0" in problem
    assert model.weight.isfinite().all()
    handle.detach()
