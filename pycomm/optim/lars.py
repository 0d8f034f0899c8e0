"""LARS: a learning rate of its own for every layer, for large batches."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.optim import update_rules
from pycomm.optim.layerwise import LayerwiseOptimizer, require_not_negative


class LARS(LayerwiseOptimizer):
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
        super().__init__(
            params,
            fused,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            trust_coefficient=trust_coefficient,
            nesterov=nesterov,
            exclude=exclude,
            maximize=maximize,
        )

    def check_group(self, group: update_rules.Group) -> None:
        require_not_negative(group, "lr", "momentum", "weight_decay", "trust_coefficient")
        if group["nesterov"] and not group["momentum"] > 0:
            raise ValueError(f"nesterov wants momentum, which is {group['momentum']}")

    def fused_step(self) -> None:
        update_rules.step_by_rule(self, update_rules.lars)

    def plain_step(self, group: update_rules.Group, target: update_rules.Target) -> None:
        w, g = target.weight, target.grad * (-1.0 if group["maximize"] else 1.0)
        rate = torch.tensor(float(group["lr"]), dtype=w.dtype, device=w.device)
        if update_rules.adapts(group, w):
            w_norm, g_norm = torch.linalg.vector_norm(w), torch.linalg.vector_norm(g)
            ratio = group["trust_coefficient"] * w_norm / (g_norm + group["weight_decay"] * w_norm)
            rate = rate * torch.where((w_norm > 0) & (g_norm != 0), ratio, 1.0)
            g = g + group["weight_decay"] * w
        step = rate * g
        if group["momentum"]:
            v = target.buffer("momentum_buffer").mul_(group["momentum"]).add_(step)
            step = step + group["momentum"] * v if group["nesterov"] else v
        target.param.copy_(w - step)
