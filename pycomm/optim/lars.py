"""LARS: a learning rate of its own for every layer, for large batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycomm.optim import rules
from pycomm.optim.fused import step_by_rule
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.takeover import evaluate

EXCLUSIONS = ("one_dimensional", "all", "none")
"""Which parameters get neither the ratio nor weight decay; biases and norm parameters have one dimension."""


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose steps are scaled, layer by layer, by the ratio of the norms of weight and gradient.

    Of each parameter, with eta the trust coefficient (You, Gitman and Ginsburg, "Large Batch Training
    of Convolutional Networks", 2017, algorithm 1)::

        ratio = eta * ||w|| / (||g|| + weight_decay * ||w||)        1 where ||w|| or ||g|| is 0
        v = momentum * v + lr * ratio * (g + weight_decay * w)
        w = w - v                     nesterov: w - (momentum * v + lr * ratio * (g + weight_decay * w))

    The learning rate is inside the momentum, so a change of it acts on new gradients alone, which is
    what momentum correction is for otherwise.

    Args:
        params: parameters, or groups of them, as for every torch optimizer. Groups may set everything
            below but ``fused``.
        lr: learning rate, before the ratio. The usual values are larger than SGD's, by 1 / eta.
        momentum, weight_decay: as SGD's.
        trust_coefficient: eta.
        nesterov: look ahead; wants momentum.
        exclude: "one_dimensional" (the default): parameters of fewer than two dimensions, biases and
            those of norm layers, take plain SGD steps without weight decay (give them a group with a
            smaller lr where the others' is large); "all", for a group of such parameters; "none".
        maximize: go uphill.
        fused: whether one kernel for all norms and one for all updates do it (``None``: yes, for
            float32 and float64), or plain torch operations (``False``), which also serve
            half-precision parameters, in float32. For those see :func:`pycomm.master_weights`.

    Raises:
        ValueError: a number out of range, an unknown ``exclude``.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        *,
        exclude: str = "one_dimensional",
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        self._fused = fused
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "nesterov": nesterov,
            "exclude": exclude,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        require_not_negative(group, "lr", "momentum", "weight_decay", "trust_coefficient")
        if group["exclude"] not in EXCLUSIONS:
            raise ValueError(f"exclude is {group['exclude']!r}, wanted one of {', '.join(EXCLUSIONS)}")
        if group["nesterov"] and not group["momentum"] > 0:
            raise ValueError(f"nesterov wants momentum, which is {group['momentum']}")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` as torch has it."""
        loss = evaluate(closure)
        with torch.no_grad():
            if may_fuse(self, self._fused):
                step_by_rule(self, rules.lars)
            else:
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            _plain_step(group, rules.Target(wide(p), wide(p.grad), self.state, p))
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fused": self._fused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("_fused", None)


def _plain_step(group: dict[str, Any], target: rules.Target) -> None:
    """The reference: what the kernels are compared with."""
    w, g = target.weight, target.grad * (-1.0 if group["maximize"] else 1.0)
    rate = torch.tensor(float(group["lr"]), dtype=w.dtype, device=w.device)
    if rules.adapts(group, w):
        w_norm, g_norm = torch.linalg.vector_norm(w), torch.linalg.vector_norm(g)
        ratio = group["trust_coefficient"] * w_norm / (g_norm + group["weight_decay"] * w_norm)
        rate = rate * torch.where((w_norm > 0) & (g_norm != 0), ratio, 1.0)
        g = g + group["weight_decay"] * w
    step = rate * g
    if group["momentum"]:
        v = target.buffer("momentum_buffer").mul_(group["momentum"]).add_(step)
        step = step + group["momentum"] * v if group["nesterov"] else v
    target.param.copy_(w - step)


def wide(tensor: torch.Tensor | None) -> torch.Tensor:
    """In float32 at least."""
    assert tensor is not None
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def may_fuse(optimizer: torch.optim.Optimizer, fused: bool | None) -> bool:
    """Whether the kernels can do it; TypeError where they must, and cannot."""
    if fused is False:
        return False
    for p in optimizer_parameters(optimizer):
        if p.dtype not in (torch.float32, torch.float64):
            if fused:
                raise TypeError(f"fused=True wants float32 or float64 parameters, one is {p.dtype}: see master_weights")
            return False
    return True


def require_not_negative(group: dict[str, Any], *names: str) -> None:
    for name in names:
        if not group[name] >= 0:  # NaN is not
            raise ValueError(f"{name} is {group[name]}, wanted a number that is not negative")


rules.RULES[LARS] = rules.lars
