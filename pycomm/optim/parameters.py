"""Which parameters there are, and what they are called."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_TRAINERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose optimizers are proxies, even where they show another state."""


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps, where ``optimizer`` is a trainer's proxy for it (Accelerate's, Lightning's, Fabric's).

    An optimizer that works with another one inside, and has state of its own, is none.
    """
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            return optimizer
        same = optimizer.state is inner.state and optimizer.param_groups is inner.param_groups
        if not same and type(optimizer).__module__.split(".")[0] not in _TRAINERS:
            return optimizer
        optimizer = inner


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients that there are, in the order of the groups."""
    return [p.grad for p in optimizer_parameters(optimizer) if p.grad is not None]
