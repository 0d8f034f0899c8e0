"""Update rules: the steps of each supported optimizer in terms of kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from pycomm import kernels
from pycomm.kernels.arrays import PackScaling
from pycomm.kernels.step import (
    adagrad_coefficients,
    adam_coefficients,
    lamb_coefficients,
    momentum_coefficients,
    rmsprop_coefficients,
)
from pycomm.optim.layerwise import adapts
from pycomm.optim.plans import FIRST, ByNorms, PlanPart, Rule
from pycomm.optim.targets import Group, StepTarget

Keys = tuple[str | None, ...]


def _momentum_keys(group: Group) -> Keys:
    return ("momentum_buffer" if group["momentum"] else None,)


def _sgd(group: Group, part: PlanPart, scaling: PackScaling) -> None:
    momentum = float(group["momentum"])
    # As in torch, the first momentum is the gradient itself, without dampening.
    dampening = float(group["dampening"]) if momentum and part.key.kind != FIRST else 0.0
    c = momentum_coefficients(
        float(group["lr"]), momentum, dampening, float(group["weight_decay"]), bool(group["nesterov"])
    )
    part.arrays.step("momentum", c, scaling, scratch=part.scratch("sgd"))


def _adam_keys(group: Group) -> Keys:
    return "exp_avg", "exp_avg_sq", "max_exp_avg_sq" if group["amsgrad"] else None


def _adam(group: Group, part: PlanPart, scaling: PackScaling, decoupled: bool = False) -> None:
    decoupled = decoupled or bool(group.get("decoupled_weight_decay"))
    c = adam_coefficients(float(group["lr"]), _moments(group, part), float(group["weight_decay"]), decoupled)
    part.arrays.step("adam", c, scaling, scratch=part.scratch("adam"))


def _moments(group: Group, part: PlanPart) -> kernels.Moments:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    bias_correction = bool(group.get("bias_correction", True))
    # Kernels that count steps correct the bias by their own count, whatever is passed here.
    return kernels.Moments((beta1, beta2), float(group["eps"]), part.arrays.taken or 1, bias_correction)


def _rmsprop_keys(group: Group) -> Keys:
    momentum, centered = group["momentum"], group["centered"]
    return "square_avg", "momentum_buffer" if momentum else None, "grad_avg" if centered else None


def _rmsprop(group: Group, part: PlanPart, scaling: PackScaling) -> None:
    settings = (float(group[name]) for name in ("lr", "alpha", "eps", "momentum", "weight_decay"))
    part.arrays.step("rmsprop", rmsprop_coefficients(*settings), scaling, scratch=part.scratch("rmsprop"))


def _adagrad(group: Group, part: PlanPart, scaling: PackScaling) -> None:
    lr, lr_decay, eps, decay = (float(group[name]) for name in ("lr", "lr_decay", "eps", "weight_decay"))
    rate = lr / (1.0 + ((part.arrays.taken or 1) - 1) * lr_decay)
    part.arrays.step("adagrad", adagrad_coefficients(rate, eps, decay), scaling, scratch=part.scratch("adagrad"))


def _adapts(group: Group, target: StepTarget) -> bool:
    return adapts(group, target.weight)


def _lars_squares(group: Group, part: PlanPart, scaling: PackScaling) -> torch.Tensor | None:
    """Return the squared norms of weights and of gradients, which are not scaled yet."""
    if not part.key.kind:
        return None
    squares = part.numbers(2 * part.size)
    part.arrays.squared_norms(squares, part.scratch("norms"))
    return squares.view(2, -1)


def _lars(group: Group, part: PlanPart, scaling: PackScaling, squares: torch.Tensor | None) -> None:
    decay = float(group["weight_decay"]) if part.key.kind else 0.0
    rates = part.numbers(part.size).fill_(float(group["lr"]))
    if squares is not None:
        rates *= _lars_ratios(squares, scaling, float(group["trust_coefficient"]), decay)
    # The rate is inside the momentum, which so stays correct when the learning rate changes.
    c = momentum_coefficients(1.0, float(group["momentum"]), 0.0, decay, bool(group["nesterov"]))
    part.arrays.step("momentum", c, scaling, rates=rates, scratch=part.scratch("lars"))


def _lars_ratios(squares: torch.Tensor, scaling: PackScaling, trust_coefficient: float, decay: float) -> torch.Tensor:
    """Return the trust coefficient times ||w|| / (||g|| + decay ||w||) of each weight, or 1 if a norm is 0; float64."""
    scale = abs(scaling.factor)
    if scaling.divisor is not None:
        scale = scale / scaling.divisor.double()
    w, g = squares.sqrt().unbind(0)
    g = g * scale
    return torch.where((w > 0) & (g != 0), trust_coefficient * w / (g + decay * w), 1.0)


def _lamb_coefficients(group: Group, part: PlanPart) -> Any:
    return lamb_coefficients(_moments(group, part), float(group["weight_decay"]) if part.key.kind else 0.0)


def _lamb_moments(group: Group, part: PlanPart, scaling: PackScaling) -> torch.Tensor | None:
    """Update the moments; return the squared norms of weights and of the steps that the moments make."""
    c, squares = _lamb_coefficients(group, part), part.numbers(2 * part.size)
    part.arrays.step("lamb_moments", c, scaling, squares=squares, scratch=part.scratch("lamb"))
    return squares.view(-1, 2).t() if part.key.kind else None


def _lamb(group: Group, part: PlanPart, scaling: PackScaling, squares: torch.Tensor | None) -> None:
    c, rates = _lamb_coefficients(group, part), part.numbers(part.size).fill_(float(group["lr"]))
    if squares is not None:
        w, r = squares.sqrt().unbind(0)
        rates *= torch.where((w > 0) & (r != 0), w / r, 1.0)
    part.arrays.step("lamb_apply", c, scaling, rates=rates, scratch=part.scratch("lamb_apply"))


sgd = Rule(
    "momentum",
    _momentum_keys,
    _sgd,
    kind=lambda group, target: FIRST if group["momentum"] and not target.has("momentum_buffer") else None,
    waits=lambda group: bool(group["momentum"] and group["dampening"]),  # a skipped first step would leave a momentum
)
"""Steps as torch.optim.SGD does."""

adam = Rule("adam", _adam_keys, _adam, has_counts=True, same_counts=True)
"""Steps as torch.optim.Adam does."""

adamw = Rule("adam", _adam_keys, partial(_adam, decoupled=True), has_counts=True, same_counts=True)
"""Steps as torch.optim.AdamW does."""

rmsprop = Rule("rmsprop", _rmsprop_keys, _rmsprop, has_counts=True)
"""Steps as torch.optim.RMSprop does."""

adagrad = Rule(
    "adagrad",
    lambda group: ("sum",),
    _adagrad,
    has_counts=True,
    same_counts=True,
    waits=lambda group: bool(group["lr_decay"]),  # the rate depends on how many steps were taken
    initial=lambda group: float(group["initial_accumulator_value"]),
)
"""Steps as torch.optim.Adagrad does."""

_LARS, _LAMB = ByNorms(_lars_squares, _lars), ByNorms(_lamb_moments, _lamb)

lars = Rule("momentum", _momentum_keys, _LARS.run, _adapts, norms=_LARS)
"""Steps as :class:`pycomm.LARS` does."""

lamb = Rule(
    "lamb_moments",
    lambda group: ("exp_avg", "exp_avg_sq"),
    _LAMB.run,
    _adapts,
    has_counts=True,
    same_counts=True,
    norms=_LAMB,
)
"""Steps as :class:`pycomm.LAMB` does."""
