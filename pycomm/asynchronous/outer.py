"""Outer optimizers: what is made of the mean of how far the ranks have gone since they last met."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pycomm import checks


@dataclass(frozen=True)
class Nesterov:
    """Outer optimizer of DiLoCo: SGD with Nesterov momentum, whose gradient is how far the ranks have gone on average.

    With d the mean over the ranks of (parameters at the last meeting - parameters now): v = momentum * v + d, and
    the parameters become those at the last meeting - lr * (d + momentum * v) (Douillard et al., "DiLoCo", 2023).

    Args:
        lr: positive; the paper has 0.7.
        momentum: from 0 to below 1; the paper has 0.9.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.real("lr", self.lr, 0.0, or_equal=False)
        checks.real("momentum", self.momentum, 0.0, 1.0)

    def step(self, anchor: torch.Tensor, velocity: torch.Tensor, moved: torch.Tensor) -> None:
        """Step ``anchor`` and ``velocity`` by the mean ``moved``, which may be overwritten; flat, of one size."""
        velocity.mul_(self.momentum).add_(moved)
        anchor.sub_(moved.add_(velocity, alpha=self.momentum), alpha=self.lr)


@dataclass(frozen=True)
class Elastic:
    """Outer optimizer of elastic averaging: ``strength`` is beta, the ranks' pull on their center together."""

    strength: float
