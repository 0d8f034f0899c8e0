"""``local_sgd``: what ranks come to that meet every so many steps is what one process comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import CommError
from tests.asynchronous.runs import loss_of, model_of
from tests.on_ranks import Pools, on_ranks
from tests.survival.training import die

TIMEOUT = 110.0
STEPS = 13
OUTERS = [None, pycomm.Nesterov(0.7, 0.9)]


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def expected(
    size: int, every: int, outer: pycomm.Nesterov | None, turns: list[tuple[slice, int]]
) -> list[torch.Tensor]:
    """What the ranks' parameters are after each step of all, in float64; rank r weighs r + 1."""
    models = [model_of() for _ in range(size)]
    optimizers = [torch.optim.Adam(model.parameters(), 0.02) for model in models]
    anchor = flat(models[0])
    velocity, found = torch.zeros_like(anchor), []
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        now = torch.stack([flat(model) for model in models])
        for piece, turn in turns:
            if step % every + 1 != turn:
                continue
            weights = torch.arange(1.0, size + 1, dtype=torch.float64)
            moved = ((anchor - now)[:, piece] * weights[:, None]).sum(0) / weights.sum()
            if outer is not None:
                velocity[piece] = outer.momentum * velocity[piece] + moved
                moved = outer.lr * (moved + outer.momentum * velocity[piece])
            anchor[piece] -= moved
            now[:, piece] = anchor[piece]
        for model, mine in zip(models, now, strict=True):
            torch.nn.utils.vector_to_parameters(mine.clone(), model.parameters())
        found.append(now.clone())
    return found


@pytest.mark.parametrize("outer", OUTERS, ids=["local SGD", "DiLoCo"])
@pytest.mark.parametrize("fragments", [1, 2])
@on_ranks(2, 3, timeout=TIMEOUT)
def test_it_is_what_one_process_comes_to(outer: pycomm.Nesterov | None, fragments: int) -> None:
    rank, size, every = dist.get_rank(), dist.get_world_size(), 4
    model = model_of()
    if rank > 0:
        with torch.no_grad():
            next(model.parameters()).zero_()  # rank 0's is copied
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    handle = pycomm.local_sgd(optimizer, model, every=every, outer=outer, fragments=fragments, timeout=60)
    handle.set_weight(rank + 1)
    # The first layer's weight is about half of all: 30 of 53 elements.
    turns = [(slice(0, 53), 4)] if fragments == 1 else [(slice(0, 30), 2), (slice(30, 53), 4)]
    for step, wanted in enumerate(expected(size, every, outer, turns)):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), wanted[rank], rtol=1e-12, atol=1e-12)
    stats = handle.stats()
    assert stats["meetings"] == len([step for step in range(STEPS) for _, turn in turns if step % every + 1 == turn])
    assert stats["bytes_sent"] <= stats["meetings"] * 8 * 54
    handle.meet()
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, flat(model))
    assert all(torch.equal(other, everyones[0]) for other in everyones)
    handle.detach()
    handle.detach()


@on_ranks(3, timeout=TIMEOUT)
def test_elastic_averaging_is_what_one_process_comes_to() -> None:
    rank, size, every, pull = dist.get_rank(), 3, 3, 0.8 / 3
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    handle = pycomm.elastic_averaging(optimizer, model, every=every, strength=0.8, timeout=60)
    models = [model_of() for _ in range(size)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in models]
    center = flat(models[0])
    for step in range(STEPS):
        for number, (each, its) in enumerate(zip(models, optimizers, strict=True)):
            its.zero_grad()
            loss_of(each, number, step).backward()
            its.step()
        if step % every == every - 1:
            apart = torch.stack([flat(each) for each in models]) - center
            for each, distance in zip(models, apart, strict=True):
                torch.nn.utils.vector_to_parameters(flat(each) - pull * distance, each.parameters())
            center = center + pull * apart.sum(0)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        torch.testing.assert_close(flat(model), flat(models[rank]), rtol=1e-12, atol=1e-12)
    handle.take_center()
    torch.testing.assert_close(flat(model), center, rtol=1e-12, atol=1e-12)
    handle.detach()
    with pytest.raises(ValueError, match="strength"):
        pycomm.elastic_averaging(optimizer, model, every=every, strength=1.5, timeout=60)


@on_ranks(2, timeout=TIMEOUT)
def test_it_goes_on_from_its_state() -> None:
    rank, ends = dist.get_rank(), []
    for interrupted in (False, True):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        handle = pycomm.local_sgd(optimizer, model, every=4, outer=pycomm.Nesterov(), fragments=2, timeout=60)
        for step in range(STEPS):
            if interrupted and step == 6:
                state, weights = handle.state_dict(), model.state_dict()
                handle.detach()
                model = model_of()
                optimizer = torch.optim.SGD(model.parameters(), 0.05)
                handle = pycomm.local_sgd(optimizer, model, every=4, outer=pycomm.Nesterov(), fragments=2, timeout=60)
                model.load_state_dict(weights)  # each rank's own
                handle.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        ends.append(flat(model))
        with pytest.raises(ValueError, match="not a LocalAverager"):
            handle.load_state_dict({})
        with pytest.raises(ValueError, match="another outer optimizer"):
            handle.load_state_dict({**handle.state_dict(), "velocities": {}})
        handle.detach()
    assert torch.equal(ends[0], ends[1])


def make(options: dict[str, Any]) -> None:
    model = model_of(options.pop("dtype", torch.float32))
    other = options.pop("other", None)
    if other is not None and dist.get_rank() == 1:
        options |= other
    params = list(model.parameters())[: options.pop("params", None)]
    pycomm.local_sgd(torch.optim.SGD(params, 0.1), model, timeout=60, **options).detach()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"every": 2, "fragments": 3}, "fragments=3, wanted at most every=2"),
        ({"every": 4, "outer": "sgd"}, "outer is 'sgd'"),
        ({"every": 4, "dtype": torch.float16}, "parameters are torch.float16"),
        ({"every": 4, "params": 3}, "does not belong to the optimizer"),
        ({"every": 4, "other": {"every": 5}}, "the ranks disagree: setting"),
    ],
)
def test_mistakes_are_told_to_all(rank_pools: Pools, options: dict[str, Any], problem: str) -> None:
    for outcome in rank_pools(2).outcomes(make, options, timeout=TIMEOUT):
        assert isinstance(outcome.error, (ValueError, TypeError)), outcome.trace
        assert problem in str(outcome.error)


def lose_one() -> int:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    pycomm.local_sgd(optimizer, model, every=3, timeout=60)
    for step in range(6):
        if dist.get_rank() == 1 and step == 4:
            die()
        try:
            optimizer.step()
        except CommError:
            return step
    return -1


def test_a_rank_that_dies_is_an_error_at_the_next_meeting(new_ranks: Pools) -> None:
    outcomes = new_ranks(3).outcomes(lose_one, timeout=TIMEOUT)
    assert [outcomes[0].result, outcomes[2].result] == [5, 5]
