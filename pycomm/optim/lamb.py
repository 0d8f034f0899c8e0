"""LAMB: Adam with steps scaled layer by layer, for large batches."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.optim import update_rules
from pycomm.optim.layerwise import LayerwiseOptimizer, adapts, require_not_negative
from pycomm.optim.targets import Group, StepTarget, next_steps


class LAMB(LayerwiseOptimizer):
    """Adam with decoupled weight decay whose steps are scaled, layer by layer, to the norm of the weight.

    The update of each parameter is (You et al., "Large Batch Optimization for Deep Learning: Training
    BERT in 76 Minutes", 2020, algorithm 2)::

        m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
        r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
        w = w - lr * ||w|| / ||r|| * r                                  the ratio is 1 where a norm is 0

    Args:
        params: parameters, or groups of them. Groups may set every option below except ``fused``.
        lr: learning rate; the size of a step relative to the norm of the weight.
        betas, eps: as in Adam.
        weight_decay: decoupled, but included in the norm of the step.
        bias_correction: whether m and v are divided by 1 - beta^t as above.
        exclude, maximize, fused: as in :class:`LARS`.

    Raises:
        TypeError: ``fused=True`` with half-precision parameters, from ``step``.
        ValueError: a number is out of range, or ``exclude`` is unknown.
    """

    rule = update_rules.lamb

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
        super().__init__(
            params,
            fused,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
            exclude=exclude,
            maximize=maximize,
        )

    def check_group(self, group: Group) -> None:
        require_not_negative(group, "lr", "eps", "weight_decay")
        for i, beta in enumerate(group["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{i}] is {beta}, wanted 0 <= beta < 1")

    def direction(self, group: Group, target: StepTarget) -> torch.Tensor:
        w, g = target.weight, target.grad * (-1.0 if group["maximize"] else 1.0)
        t, (beta1, beta2) = next_steps([target])[0], group["betas"]
        m = target.buffer("exp_avg").lerp_(g, 1.0 - beta1)
        v = target.buffer("exp_avg_sq").mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        if group["bias_correction"]:
            m, v = m / (1.0 - beta1**t), v / (1.0 - beta2**t)
        r = m / (v.sqrt() + group["eps"])
        decayed: torch.Tensor = r + group["weight_decay"] * w if adapts(group, w) else r
        return decayed

    def apply(
        self, group: Group, target: StepTarget, direction: torch.Tensor, norms: torch.Tensor | None
    ) -> torch.Tensor:
        w = target.weight
        ratio = torch.ones((), dtype=w.dtype, device=w.device)
        if norms is not None:
            w_norm, r_norm = norms
            ratio = torch.where((w_norm > 0) & (r_norm != 0), w_norm / r_norm, 1.0)
        stepped: torch.Tensor = w - group["lr"] * ratio * direction
        return stepped
