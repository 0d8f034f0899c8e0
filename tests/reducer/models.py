"""Models and data that are functions of a seed, so that every rank can compute what every other rank has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models import perceptron


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Return a small model; any, since torch's stubs know nothing of what its layers have."""
    return perceptron(12, 40, 30, 5, seed=seed, dtype=dtype)


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 12, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(8, 5, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch_of(rank, step, next(model.parameters()).dtype)
    return ((model(x) - y) ** 2).mean()


def losses_at(step: int) -> list[Callable[[nn.Module], torch.Tensor]]:
    return [partial(loss_of, rank=r, step=step) for r in range(dist.get_world_size())]


def average_gradients(model: nn.Module, losses: list[Callable[[nn.Module], torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The mean over ``losses`` (one per rank) of the gradients at ``model``'s parameters, computed here and alone."""
    total: dict[str, torch.Tensor] = {}
    for loss in losses:
        grads = torch.autograd.grad(loss(model), list(model.parameters()), allow_unused=True)
        for (name, param), grad in zip(model.named_parameters(), grads, strict=True):
            total[name] = total.get(name, torch.zeros_like(param)) + (0 if grad is None else grad)
    return {name: grad / len(losses) for name, grad in total.items()}


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def close(actual: torch.Tensor | None, wanted: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


class Normed(nn.Module):
    """A matrix, and vectors and statistics beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(12, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.body(x))


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
        model[4](Explodes.apply(model[:4](torch.ones(1, 12, dtype=torch.float64)))).sum().backward()  # type: ignore[index]
