"""Outer optimizers: what is made of how far the ranks have gone since they last met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

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

    def optimizer(self, params: Iterable[torch.Tensor], num_ranks: int) -> torch.optim.Optimizer:
        """Return a torch optimizer that does the same with ``.grad``."""
        return torch.optim.SGD(params, self.lr, self.momentum, nesterov=self.momentum > 0)


@dataclass(frozen=True)
class DelayedNesterov:
    """Outer optimizer for ranks that hand in what they did one by one: momentum is delayed until several have come.

    Every contribution g moves the parameters at once, by lr * (g / n + c * momentum * v), where n is the number of
    contributions between two changes of the velocity v. Every n-th one also changes it, to momentum * v plus the mean
    of the last n, and moves the parameters by lr * (g / n + (1 - c * n + c) * momentum * v) with the new v. Momentum
    that is applied n times as often, to contributions that are each behind, makes training diverge (Liu et al.,
    "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv:2401.09135, algorithm 3).

    Args:
        lr: positive.
        momentum: from 0 to below 1.
        buffer: n, at least 1; the number of ranks if ``None``.
        activation: c, from 0 to 1 / n: share of the momentum that is applied at each contribution. The paper has 0.

    Raises:
        TypeError, ValueError: an argument is wrong; it is named.
    """

    lr: float = 0.7
    momentum: float = 0.9
    buffer: int | None = None
    activation: float = 0.0

    def __post_init__(self) -> None:
        checks.real("lr", self.lr, 0.0, or_equal=False)
        checks.real("momentum", self.momentum, 0.0, 1.0)
        if self.buffer is not None:
            checks.count("buffer", self.buffer, 1)
        most = 1.0 / (self.buffer or 1)
        checks.bounded(
            "activation", self.activation, f"a number from 0 to 1 / buffer = {most:g}", lambda c: 0 <= c <= most
        )

    def optimizer(self, params: Iterable[torch.Tensor], num_ranks: int) -> torch.optim.Optimizer:
        """Return a torch optimizer that steps by it, ``.grad`` being a contribution."""
        return _DelayedNesterov(params, self, self.buffer or num_ranks)


class _DelayedNesterov(torch.optim.Optimizer):
    """Steps of :class:`DelayedNesterov`; groups hold its numbers, state a velocity and a sum of gradients."""

    def __init__(self, params: Iterable[torch.Tensor], settings: DelayedNesterov, buffer: int) -> None:
        activation = min(settings.activation, 1.0 / buffer)
        super().__init__(
            params, {"lr": settings.lr, "momentum": settings.momentum, "buffer": buffer, "activation": activation}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter by its gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            lr, momentum, count, share = (group[key] for key in ("lr", "momentum", "buffer", "activation"))
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "velocity": torch.zeros_like(p), "sum": torch.zeros_like(p)}
                state["step"] += 1
                state["sum"].add_(p.grad)
                applied = share
                if state["step"] % count == 0:
                    state["velocity"].mul_(momentum).add_(state["sum"], alpha=1.0 / count)
                    state["sum"].zero_()
                    applied = 1.0 - share * count + share
                p.sub_(p.grad, alpha=lr / count)
                if applied:
                    p.sub_(state["velocity"], alpha=lr * momentum * applied)
        return loss


@dataclass(frozen=True)
class Elastic:
    """Outer optimizer of elastic averaging: ``strength`` is beta, the ranks' pull on their center together."""

    strength: float
