"""Models and data that are functions of a seed, so that every rank can compute what every other rank has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import communicator

Loss = Callable[[nn.Module, int], torch.Tensor]


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 5)).to(dtype)


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 12, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(8, 5, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch_of(rank, step, next(model.parameters()).dtype)
    return ((model(x) - y) ** 2).mean()


def average_gradients(model: nn.Module, losses: list[Callable[[nn.Module], torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean over ``losses`` (one per rank) of the gradients at ``model``'s parameters, computed here and alone."""
    total: dict[str, torch.Tensor] = {}
    for loss in losses:
        grads = torch.autograd.grad(loss(model), list(model.parameters()), allow_unused=True)
        for (name, param), grad in zip(model.named_parameters(), grads, strict=True):
            total[name] = total.get(name, torch.zeros_like(param)) + (0 if grad is None else grad)
    return {name: grad / len(losses) for name, grad in total.items()}


class Explodes(torch.autograd.Function):
    """Ends a backward pass by an exception."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in the middle of backward")


def explode(model: nn.Module) -> None:
    """A backward pass of :func:`make_model`'s that comes as far as the last layer."""
    with pytest.raises(ArithmeticError):
        model[4](Explodes.apply(model[:4](torch.ones(1, 12, dtype=torch.float64)))).sum().backward()  # type: ignore[operator,index]


@contextmanager
def over_torch(on: bool = True) -> Iterator[None]:
    """Communicators that are made inside go over torch.distributed."""
    original = vars(communicator)["choose_transport"]
    if on:
        vars(communicator).update(choose_transport=lambda group, _, *rest: original(group, "torch", *rest))
    try:
        yield
    finally:
        vars(communicator).update(choose_transport=original)


@contextmanager
def attached(optimizer: torch.optim.Optimizer, model: Any, **options: Any) -> Iterator[pycomm.Reducer]:
    reducer = pycomm.attach(optimizer, model, timeout=30, **options)
    try:
        yield reducer
    finally:
        reducer.detach()


def assert_replicas_equal(model: nn.Module) -> None:
    """Bit for bit, through torch.distributed itself."""
    flat = torch.cat([p.detach().reshape(-1).view(torch.uint8) for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(other, everyone[0]) for other in everyone)


def close(actual: torch.Tensor | None, wanted: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


def own_state(reducer_or_saved: Any) -> dict[str, dict[str, torch.Tensor]]:
    """What one rank's ``Reducer.state_dict()`` has: name -> key -> tensor."""
    saved = reducer_or_saved if isinstance(reducer_or_saved, dict) else reducer_or_saved.state_dict()
    (state,) = saved["ranks"].values()
    return dict(state)


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def losses_at(step: int) -> list[Callable[[nn.Module], torch.Tensor]]:
    return [partial(loss_of, rank=r, step=step) for r in range(dist.get_world_size())]
