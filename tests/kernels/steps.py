"""Steps of optimizers: what they are given, and what csrc/kernels/step.h says must come out, in torch operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from pycomm import kernels
from tests.kernels.reference import FLOATS, interesting

LR, DECAY, MOMENTUM, ALPHA, EPS = 0.1, 0.01, 0.9, 0.95, 1e-8
MOMENTS = kernels.Moments((0.9, 0.99), EPS, step=3)


@dataclass(frozen=True)
class Kind:
    """A rule, which of its states there are, and what else it is told."""

    rule: str
    states: tuple[bool, ...]
    options: dict[str, Any] = field(default_factory=dict)
    rates: bool = False


_RMSPROP = {"lr": LR, "alpha": ALPHA, "eps": EPS}
_ADAM = {"lr": LR, "moments": MOMENTS, "weight_decay": DECAY}
_MOMENTUM = {"lr": LR, "momentum": MOMENTUM}
KINDS = {
    "sgd": Kind("momentum", (False,), {"lr": LR, "weight_decay": DECAY}),
    "momentum": Kind("momentum", (True,), {**_MOMENTUM, "dampening": 0.3}),
    "nesterov": Kind("momentum", (True,), {**_MOMENTUM, "weight_decay": DECAY, "nesterov": True}, rates=True),
    "adam": Kind("adam", (True, True, False), _ADAM),
    "adamw": Kind("adam", (True, True, False), {**_ADAM, "decoupled": True}),
    "amsgrad": Kind("adam", (True, True, True), _ADAM),
    "rmsprop": Kind("rmsprop", (True, False, False), _RMSPROP),
    "rmsprop momentum": Kind("rmsprop", (True, True, False), {**_RMSPROP, "momentum": MOMENTUM}),
    "rmsprop centered": Kind("rmsprop", (True, True, True), {**_RMSPROP, "momentum": MOMENTUM, "weight_decay": DECAY}),
    "adagrad": Kind("adagrad", (True,), {"lr": LR, "eps": EPS, "weight_decay": DECAY}),
    "lamb": Kind("lamb", (True, True), {"moments": MOMENTS, "weight_decay": DECAY}, rates=True),
}
Arrays = list[Any]


@dataclass(frozen=True)
class Given:
    """The arguments of one step, two passes for LAMB."""

    kind: Kind
    weights: Arrays
    grads: Arrays
    states: list[Any]  # arrays, or None where there are none
    copies: Arrays | None = None
    rates: Any = None
    scale: Any = 0.3

    def moved(self, move: Callable[[torch.Tensor], Any]) -> Given:
        """All arrays elsewhere, the same way."""

        def each(arrays: Arrays | None) -> Arrays | None:
            return None if arrays is None else [move(array) for array in arrays]

        return replace(
            self,
            weights=[move(weight) for weight in self.weights],
            grads=[move(grad) for grad in self.grads],
            states=[each(states) for states in self.states],
            copies=each(self.copies),
            rates=None if self.rates is None else move(self.rates),
        )

    def run(self, scratch: kernels.Scratch | None = None) -> Any:
        """In place; LAMB's squares."""
        options = self.kind.options
        more: dict[str, Any] = {"copies": self.copies, "scratch": scratch}
        if self.kind.rule == "lamb":
            first: dict[str, Any] = {"scale": self.scale, "scratch": scratch}
            firsts, seconds = self.states
            squares = kernels.lamb_moments(self.weights, self.grads, firsts, seconds, **options, **first)
            kernels.lamb_apply(self.weights, firsts, seconds, self.rates, **options, **more)
            return squares
        step: Callable[..., None] = getattr(kernels, f"{self.kind.rule}_step")
        if self.kind.rates:
            more["rates"] = self.rates
        step(self.weights, self.grads, *self.states, scale=self.scale, **options, **more)
        return None

    def everything(self) -> Arrays:
        """That a step writes."""
        return [array for arrays in (self.weights, *self.states, self.copies) for array in arrays or []]

    def wanted(self) -> tuple[Arrays, torch.Tensor]:
        """What everything() must then be, rounded at every operation, and LAMB's squares."""
        after: list[Arrays] = []
        squares = []
        for j, (weight, grad) in enumerate(zip(self.weights, self.grads, strict=True)):
            states = [None if arrays is None else arrays[j] for arrays in self.states]
            rate = 1.0 if self.rates is None else self.rates[j].item()
            new_weight, new_states, direction = _RULES[self.kind.rule](
                weight, grad.to(weight.dtype) * _number(self.scale, weight), states, rate, **self.kind.options
            )
            copy = [] if self.copies is None else [new_weight.to(self.copies[j].dtype)]
            after.append([new_weight, *(state for state in new_states if state is not None), *copy])
            squares.append([weight.double().square().sum(), direction.double().square().sum()])
        return [array for kind in zip(*after, strict=True) for array in kind], torch.tensor(squares)


def given(name: str, sizes: list[int], dtype: torch.dtype, gap: int = 0, special: bool = False, seed: int = 1) -> Given:
    """A step of one of KINDS. Gradients take turns in their types, which arrays begin ``gap`` elements into memory."""
    kind = KINDS[name]
    generator = torch.Generator().manual_seed(seed)

    def some(size: int, of_type: torch.dtype) -> torch.Tensor:
        if special:
            return interesting(size + gap, of_type, int(torch.randint(1 << 30, (1,), generator=generator)))[gap:]
        return torch.randn(size + gap, generator=generator).to(of_type)[gap:]

    def state(s: int, size: int) -> torch.Tensor:
        """Means of squares are not negative."""
        array = some(size, dtype)
        is_square = s == 0 if kind.rule in ("rmsprop", "adagrad") else s > 0
        return array.abs_() if is_square else array

    halves = (torch.float16, torch.bfloat16)
    return Given(
        kind,
        weights=[some(size, dtype) for size in sizes],
        grads=[some(size, FLOATS[j % len(FLOATS)]) for j, size in enumerate(sizes)],
        states=[[state(s, size) for size in sizes] if there else None for s, there in enumerate(kind.states)],
        copies=None if dtype == torch.float64 else [some(size, halves[j % 2]) for j, size in enumerate(sizes)],
        rates=torch.rand(len(sizes), generator=generator).double() if kind.rates else None,
    )


def clone(x: torch.Tensor) -> torch.Tensor:
    """With the alignment that it has."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(value, dtype=like.dtype)


def _root(x: torch.Tensor) -> torch.Tensor:
    """Torch's own is not always the nearest."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(x.numpy()))


State = torch.Tensor | None
After = tuple[torch.Tensor, list[State], torch.Tensor]


def _momentum(
    w: torch.Tensor,
    g: torch.Tensor,
    states: list[State],
    rate: float,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> After:
    g = g + w * _number(weight_decay, w)
    taken = d = (_number(rate, w) * _number(1.0 - dampening, w)) * g
    (v,) = states
    if v is not None:
        d = v = _number(momentum, w) * v + taken
        if nesterov:
            d = taken + _number(momentum, w) * v
    return w - _number(lr, w) * d, [v], d


def _moments(g: torch.Tensor, m: State, v: State, moments: kernels.Moments) -> tuple[torch.Tensor, torch.Tensor]:
    beta1, beta2 = moments.betas
    assert m is not None
    assert v is not None
    m = m + _number(1.0 - beta1, m) * (g - m)
    return m, _number(beta2, m) * v + _number(1.0 - beta2, m) * (g * g)


def ratio(m: torch.Tensor, v: torch.Tensor, moments: kernels.Moments) -> torch.Tensor:
    beta1, beta2 = moments.betas
    inverse_correction1, inverse_root2 = 1.0 / (1.0 - beta1**moments.step), 1.0 / math.sqrt(1.0 - beta2**moments.step)
    return m * _number(inverse_correction1, m) / (_root(v) * _number(inverse_root2, m) + _number(moments.eps, m))


def _adam(
    w: torch.Tensor,
    g: torch.Tensor,
    states: list[State],
    _rate: float,
    *,
    lr: float,
    moments: kernels.Moments,
    weight_decay: float,
    decoupled: bool = False,
) -> After:
    g = g + w * _number(0.0 if decoupled else weight_decay, w)
    u = states[2]
    m, v = _moments(g, states[0], states[1], moments)
    if u is not None:
        u = torch.where(u.isnan() | (u > v), u, v)
    d = ratio(m, v if u is None else u, moments)
    decoupled_decay = _number(lr * weight_decay if decoupled else 0.0, w)
    return w - (decoupled_decay * w + _number(lr, w) * d), [m, v, u], d


def _rmsprop(
    w: torch.Tensor,
    g: torch.Tensor,
    states: list[State],
    _rate: float,
    *,
    lr: float,
    alpha: float,
    eps: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> After:
    g = g + w * _number(weight_decay, w)
    one_minus_alpha = _number(1.0 - alpha, w)
    q, b, a = states
    assert q is not None
    q = spread = _number(alpha, w) * q + one_minus_alpha * (g * g)
    if a is not None:
        a = a + one_minus_alpha * (g - a)
        spread = (q - a * a).clamp(min=0)
    d = g / (_root(spread) + _number(eps, w))
    if b is not None:
        d = b = _number(momentum, w) * b + d
    return w - _number(lr, w) * d, [q, b, a], d


def _adagrad(
    w: torch.Tensor, g: torch.Tensor, states: list[State], _rate: float, *, lr: float, eps: float, weight_decay: float
) -> After:
    g = g + w * _number(weight_decay, w)
    (s,) = states
    assert s is not None
    s = s + g * g
    d = g / (_root(s) + _number(eps, w))
    return w - _number(lr, w) * d, [s], d


def _lamb(
    w: torch.Tensor,
    g: torch.Tensor,
    states: list[State],
    rate: float,
    *,
    moments: kernels.Moments,
    weight_decay: float,
) -> After:
    m, v = _moments(g, states[0], states[1], moments)
    d = ratio(m, v, moments) + w * _number(weight_decay, w)
    return w - _number(rate, w) * d, [m, v], d


_RULES: dict[str, Callable[..., After]] = {
    "momentum": _momentum,
    "adam": _adam,
    "rmsprop": _rmsprop,
    "adagrad": _adagrad,
    "lamb": _lamb,
}
