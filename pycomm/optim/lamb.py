"""LAMB: Adam's steps, scaled layer by layer, for large batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycomm.optim import rules
from pycomm.optim.fused import step_by_rule
from pycomm.optim.lars import EXCLUSIONS, may_fuse, require_not_negative, wide
from pycomm.optim.takeover import evaluate


class LAMB(torch.optim.Optimizer):
    """Adam with decoupled weight decay whose steps have, layer by layer, the norm of the weight.

    Of each parameter (You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76
    Minutes", 2020, algorithm 2)::

        m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
        r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * ||w|| / ||r|| * r                                  the ratio is 1 where a norm is 0

    Args:
        params: parameters, or groups of them. Groups may set everything below but ``fused``.
        lr: learning rate: the relative change of a weight's norm.
        betas, eps: Adam's.
        weight_decay: decoupled, inside the norm of the step.
        bias_correction: whether m and v are divided as above.
        exclude, maximize, fused: as :class:`LARS` has them.

    Raises:
        ValueError: a number out of range, an unknown ``exclude``.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        exclude: str = "one_dimensional",
        maximize: bool = False,
        fused: bool | None = None,
    ) -> None:
        self._fused = fused
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "exclude": exclude,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        require_not_negative(group, "lr", "eps", "weight_decay")
        for i, beta in enumerate(group["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{i}] is {beta}, wanted 0 <= beta < 1")
        if group["exclude"] not in EXCLUSIONS:
            raise ValueError(f"exclude is {group['exclude']!r}, wanted one of {', '.join(EXCLUSIONS)}")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` as torch has it."""
        loss = evaluate(closure)
        with torch.no_grad():
            if may_fuse(self, self._fused):
                step_by_rule(self, rules.lamb)
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
    t, (beta1, beta2) = rules.next_step(target), group["betas"]
    m = target.buffer("exp_avg").lerp_(g, 1.0 - beta1)
    v = target.buffer("exp_avg_sq").mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    if group["bias_correction"]:
        m, v = m / (1.0 - beta1**t), v / (1.0 - beta2**t)
    r = m / (v.sqrt() + group["eps"])
    ratio = torch.ones((), dtype=w.dtype, device=w.device)
    if rules.adapts(group, w):
        r = r + group["weight_decay"] * w
        w_norm, r_norm = torch.linalg.vector_norm(w), torch.linalg.vector_norm(r)
        ratio = torch.where((w_norm > 0) & (r_norm != 0), w_norm / r_norm, 1.0)
    target.param.copy_(w - group["lr"] * ratio * r)


rules.RULES[LAMB] = rules.lamb
