"""Optimizers that cannot step a part of a matrix, and some that cannot step their parameters one by one."""

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


class ClippingAll(Orthogonal):
    """Depends on all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() if params else 1.0
        for p in params:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


class DecayingByAll(Orthogonal):
    """Depends on all gradients together, a little."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        decay = 1e-4 * float(sum(p.grad.sum() for p in params))
        for p in params:
            p.sub_(p.grad + decay * p, alpha=0.1)


class Bounded(Orthogonal):
    """Depends on all gradients together only if they are large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        bound = max(1.0, float(sum(p.grad.norm() for p in params)) / 1e4)
        for p in params:
            p.sub_(p.grad, alpha=0.1 / bound)


class Estimating(Orthogonal):
    """Sums up gradients in an attribute, which steps use later on."""

    seen = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            p.sub_(p.grad, alpha=0.1 + 0.01 * (self.seen > 100.0))
        self.seen += float(sum(p.grad.abs().sum() for p in params))


class DecayingAll(Orthogonal):
    """Changes parameters that have no gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.mul_(0.99)
        super().step()


class CountingApart(Orthogonal):
    """Sums up gradients in state that belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        of_any: Any = self.state
        state = of_any["all"]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state["seen"] = state.get("seen", 0.0) + float(p.grad.abs().sum())
        super().step()


class KeepingElsewhere(Orthogonal):
    """Keeps momentum in an attribute, where no checkpoint finds it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.kept: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(self.kept.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=0.1)


COUNTS = [0]


class CountingForAll(Orthogonal):
    """Counts the steps of all optimizers of the process, by which its own get smaller."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        COUNTS[0] += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.sub_(p.grad, alpha=0.1 / COUNTS[0])


class KeepingInParameters(Orthogonal):
    """Keeps momentum in an attribute of the parameter, where neither a checkpoint nor a copy has it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = vars(p).setdefault("momentum", torch.zeros_like(p))
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.1)


class CallingItself(Orthogonal):
    """Has a method, or a function that cannot be copied, in an attribute."""

    def __init__(self, params: Any, copies: bool = False) -> None:
        super().__init__(params)
        self.update = self.apply if copies else lambda p: self.apply(p)

    def apply(self, p: torch.Tensor) -> None:
        p.sub_(self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.update(p)


class KeepingTensors(Orthogonal):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p] = p.grad.clone()


class ClippingGroups(Orthogonal):
    """Depends on all gradients of a group together, if the group says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in params]).norm() if params and group.get("clips") else 1.0
            for p in params:
                state = self.state[p]
                state["num_steps"] = state.get("num_steps", 0) + 1
                p.sub_(p.grad / norm, alpha=group["lr"])


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
    "CallingItself": lambda params: CallingItself(params, copies=True),
}
