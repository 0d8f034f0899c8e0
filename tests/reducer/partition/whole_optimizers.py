"""Optimizers that cannot step a part of a matrix, and others that are stepped as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Orthogonal(torch.optim.Optimizer):
    """Optimizer that cannot step a part of a matrix: it makes the momentum orthogonal."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in (p for p in group["params"] if p.grad is not None and p.numel() > 0):
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                state["history"] = [*state.get("history", []), group["num_steps"]][-2:]
                momentum.mul_(group["momentum"]).add_(p.grad)
                if p.dim() == 2:
                    u, _, v = torch.linalg.svd(momentum, full_matrices=False)
                    p.sub_(u @ v, alpha=group["lr"])
                else:
                    p.sub_(momentum, alpha=group["lr"])


class Replacing(Orthogonal):
    """Replaces ``param.data`` in place of writing to it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.data = p.detach() - 0.1 * p.grad


class Averaging(Orthogonal):
    """Shows another iterate in evaluation, as schedule-free optimizers do."""

    def eval(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.numel() > 0):
            p.data.add_(self.state[p]["momentum"])

    def train(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"] if p.numel() > 0):
            p.data.sub_(self.state[p]["momentum"])


class KeepingTensors(Orthogonal):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p] = p.grad.clone()


class PreparingOnce(Orthogonal):
    """Makes the state of all parameters of a group in the first step, and has no other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["num_steps"] == 0:
                for p in group["params"]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
            group["num_steps"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(self.state[p]["momentum"].mul_(0.9).add_(p.grad), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Orthogonal": Orthogonal,
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "Replacing": Replacing,
    "Averaging": Averaging,
}
