"""LARS: SGD with a separate learning rate for every layer, for large batches."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.optim import update_rules
from pycomm.optim.layerwise import LayerwiseOptimizer, require_not_negative
from pycomm.optim.targets import Group, StepTarget


class LARS(LayerwiseOptimizer):
    """SGD with momentum whose steps are scaled, layer by layer, by the ratio of the norms of weight and gradient.

    The update of each parameter, with eta the trust coefficient, is (You, Gitman and Ginsburg, "Large
    Batch Training of Convolutional Networks", 2017, algorithm 1)::

        ratio = eta * ||w|| / (||g|| + weight_decay * ||w||)        1 where ||w|| or ||g|| is 0
        v = momentum * v + lr * ratio * (g + weight_decay * w)
        w = w - v                     nesterov: w - (momentum * v + lr * ratio * (g + weight_decay * w))

    The learning rate is inside the momentum buffer, so changing it affects new gradients only; no
    separate momentum correction is needed.

    Args:
        params: parameters, or groups of them, as for every torch optimizer. Groups may set every option
            below except ``fused``.
        lr: learning rate before the ratio is applied. Usual values are larger than SGD's by 1 / eta.
        momentum, weight_decay: as in SGD.
        trust_coefficient: eta.
        nesterov: use Nesterov momentum; requires a positive ``momentum``.
        exclude: parameters that take plain SGD steps without weight decay. "one_dimensional" (the
            default): parameters of fewer than two dimensions: biases, and the parameters of norm
            layers (give them a group with a smaller lr if the other lr is large); "all", for a group of
            such parameters; "none".
        maximize: maximize the objective instead of minimizing it.
        fused: ``True``: use one kernel for all norms and one for all updates; ``False``: use plain torch
            operations, which compute half-precision parameters in float32 (see
            :func:`pycomm.master_weights` for those); ``None``: the kernels if all parameters are float32
            or float64.

    Raises:
        TypeError: ``fused=True`` with half-precision parameters, from ``step``.
        ValueError: a number is out of range, or ``exclude`` is unknown.
    """

    rule = update_rules.lars

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

    def check_group(self, group: Group) -> None:
        require_not_negative(group, "lr", "momentum", "weight_decay", "trust_coefficient")
        if group["nesterov"] and not group["momentum"] > 0:
            raise ValueError(f"momentum is {group['momentum']}, wanted a positive number, which nesterov requires")

    def direction(self, group: Group, target: StepTarget) -> torch.Tensor:
        return target.grad * (-1.0 if group["maximize"] else 1.0)

    def apply(
        self, group: Group, target: StepTarget, direction: torch.Tensor, norms: torch.Tensor | None
    ) -> torch.Tensor:
        w, g = target.weight, direction
        rate = torch.tensor(float(group["lr"]), dtype=w.dtype, device=w.device)
        if norms is not None:
            w_norm, g_norm = norms
            ratio = group["trust_coefficient"] * w_norm / (g_norm + group["weight_decay"] * w_norm)
            rate = rate * torch.where((w_norm > 0) & (g_norm != 0), ratio, 1.0)
            g = g + group["weight_decay"] * w
        step = rate * g
        if group["momentum"]:
            v = target.buffer("momentum_buffer").mul_(group["momentum"]).add_(step)
            step = step + group["momentum"] * v if group["nesterov"] else v
        return w - step
