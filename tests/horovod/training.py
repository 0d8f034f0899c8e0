"""Training by a script for Horovod, and the same on one process with the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import pycomm.horovod as hvd
from tests.models import perceptron

Batch = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def make_model(seed: int = 3) -> nn.Module:
    return perceptron(6, 8, 3, seed=seed)


def batch_of(rank: int, step: int) -> Batch:
    torch.manual_seed(1000 * step + rank)
    return torch.randn(4, 6).double(), torch.randn(4, 3).double()


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def mean_loss(model: nn.Module, ranks: Sequence[int], step: int) -> torch.Tensor:
    """Return the mean of the losses of ``ranks``."""
    return torch.stack([loss_of(model, batch_of(rank, step)) for rank in ranks]).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(make: Make, steps: int = 4, passes: int = 1, early: int = 0, **arguments: Any) -> nn.Module:
    """Train on this rank's batches with ``DistributedOptimizer``; ``early`` passes in the last step."""
    model = make_model(seed=hvd.rank())
    optimizer = make(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    made = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **arguments
    )
    assert made is optimizer
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(early if early and step == steps - 1 else passes):
            loss_of(model, batch_of(hvd.rank(), passes * step + i)).backward()
        optimizer.step()
    return model


def reference(
    make: Make, size: int, steps: int = 4, passes: int = 1, early: int = 0, scale: float | None = None
) -> nn.Module:
    """Train on the batches of all ranks; gradients of ranks are added up, times ``scale`` (by default averaged)."""
    model = make_model(seed=0)
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(early if early and step == steps - 1 else passes):
            for rank in range(size):
                factor = 1 / size if scale is None else scale
                (factor * loss_of(model, batch_of(rank, passes * step + i))).backward()
        optimizer.step()
    return model


def assert_equal_models(one: nn.Module, other: nn.Module, tolerance: float = 1e-12) -> None:
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), (name, (a - b).abs().max())
