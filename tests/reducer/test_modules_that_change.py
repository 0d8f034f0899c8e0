"""Modules whose parameters change places: alike on all ranks that is right, on one rank it is named on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models import perceptron
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, logged
from tests.reducer.models import batch_of, sgd


def make() -> Any:
    return perceptron(12, 12, 12, 12, 5, seed=0, dtype=torch.float64)


def exchange(model: Any) -> None:
    model[2].weight, model[4].weight = model[4].weight, model[2].weight


def tie(model: Any) -> None:
    model[4].weight = model[2].weight


def leave_out(model: Any) -> None:
    model[2] = nn.Identity()


def freeze_in_a_buffer(model: Any) -> None:
    value = model[2].weight.detach().clone()
    del model[2].weight
    model[2].register_buffer("weight", value)


CHANGES: dict[Callable[[Any], None], str] = {
    exchange: "'2.weight' is as it was on rank 0, attached as '4.weight' on rank 1",
    tie: "'4.weight' is as it was on rank 0, attached as '2.weight' on rank 1",
    leave_out: "'2.weight' is as it was on rank 0, gone on rank 1",
    freeze_in_a_buffer: "'2.weight' is as it was on rank 0, gone on rank 1",
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: Sequence[int]) -> None:
    optimizer.zero_grad()
    losses = [((model(x) - y) ** 2).mean() for x, y in (batch_of(rank, step) for rank in ranks)]
    (sum(losses, torch.zeros((), dtype=torch.float64)) / len(ranks)).backward()
    optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_a_change_on_one_rank_is_named_on_all(change: Callable[[Any], None]) -> None:
    model, rank = make(), dist.get_rank()
    params = list(model.parameters())
    optimizer = sgd(model)
    with attached(optimizer, model):
        for step in range(6):  # a step that compares no modes of parts
            train(model, optimizer, step, (rank,))
        before = [param.detach().clone() for param in params]
        if rank == 1:
            change(model)
        with pytest.raises(RuntimeError, match=CHANGES[change]):
            train(model, optimizer, 6, (rank,))
        assert all(map(torch.equal, before, params))


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_a_change_on_all_ranks_is_right(change: Callable[[Any], None]) -> None:
    model, alone, rank = make(), make(), dist.get_rank()
    params, right = list(model.parameters()), list(alone.parameters())
    optimizer, single = sgd(model), torch.optim.SGD(right, 0.1)
    with attached(optimizer, model) as reducer:
        for step in range(8):
            if step == 3:
                change(model)
                change(alone)
            if step == 5 and rank == 0:  # what looks at the module on one rank only
                model.eval()
                with reducer.paused():
                    model(batch_of(0, 99)[0])
                model.train()
            train(model, optimizer, step, (rank,))
            train(alone, single, step, range(dist.get_world_size()))
        for mine, wanted in zip(params, right, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_a_parameter_that_comes_back_is_no_change() -> None:
    model, rank = make(), dist.get_rank()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        for step in range(6):
            if rank == 1:
                exchange(model)
                with torch.no_grad():
                    model(batch_of(0, 99)[0])
                with reducer.paused():
                    model(batch_of(0, 99)[0]).sum()
                exchange(model)
            train(model, optimizer, step, (rank,))
        assert_replicas_equal(model)


@on_ranks(2)
def test_a_buffer_of_one_rank_is_logged() -> None:
    model, rank = make(), dist.get_rank()
    model.register_buffer("of_all", torch.ones(2))
    optimizer = sgd(model)
    with logged() as said, attached(optimizer, model):
        for step in range(6):
            if step == 3 and rank == 1:
                model[1].register_buffer("of_one", torch.ones(3))
            train(model, optimizer, step, (rank,))
        assert_replicas_equal(model)
    assert any("buffer '1.of_one' differs between the ranks" in text for text in said) == (rank == 0)
