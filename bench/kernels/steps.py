"""Steps of optimizers as the library takes them: by one kernel, with a float16 copy of the new weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bench.kernels.case import Arrays, Call, Calls, Case
from pycomm import kernels

LOSS_SCALE = 2.0  # a power of two: both sides then get the same gradients
NUM_STEPS = 10.0  # taken before
_LR, _MOMENTUM, _DECAY, _TRUST = 1e-3, 0.9, 1e-2, 1e-3
_BETAS, _EPS = (0.9, 0.999), 1e-8
_TOLERANCE = 1e-5  # of a tensor's largest element; steps are a hundred times that and more

Tensors = list[torch.Tensor]


def squared_norms(n: int) -> Case:
    """Describe the squared norms of all gradients."""
    return Case("squared norms", "_foreach_norm", 4 * n, _norms, floor="read")


def momentum(n: int) -> Case:
    """Describe a step of SGD with momentum."""
    return Case("SGD, momentum, copies in fp16", "_fused_sgd_ + _foreach_copy_", 22 * n, partial(_momentum, lars=False))


def lars(n: int) -> Case:
    """Describe a step of LARS: norms, then momentum."""
    peer_name = "_foreach_norm + _foreach_mul + _fused_sgd_ + _foreach_copy_"
    return Case("LARS, copies in fp16", peer_name, 30 * n, partial(_momentum, lars=True))


def adam(n: int, unscale: bool = False) -> Case:
    """Describe a step of Adam; with ``unscale``, the gradients are divided by the loss scale in it."""
    name, peer_name = "Adam, copies in fp16", "_fused_adam_ + _foreach_copy_"
    if unscale:
        name, peer_name = "Adam, unscale, copies in fp16", f"_foreach_mul_ + {peer_name}"
    return Case(name, peer_name, 30 * n, partial(_adam, unscale=unscale))


class Model:
    """Weights in float32, two states of each that an optimizer keeps, and weights in float16."""

    def __init__(self, start: Sequence[Tensors]) -> None:
        self.weights, self.firsts, self.seconds = ([t.clone() for t in tensors] for tensors in start)
        self.halves = [weight.half() for weight in self.weights]

    def in_float32(self) -> list[Tensors]:
        return [self.weights, self.firsts, self.seconds]


class Models:
    """Two models, ours and the peer's, from the same weights and states; cases that share memory share them."""

    def __init__(self, arrays: Arrays) -> None:
        self.device, self.grads = arrays.device, arrays.grads
        self.half_grads = arrays.views(arrays.half)
        weights, firsts, seconds = ([arrays.normal(shape) for shape in arrays.shapes] for _ in range(3))
        for tensor in seconds:  # mean squares, which optimizers take the roots of and divide by
            tensor.abs_().add_(0.5)
        self.ours, self.theirs = (Model([weights, firsts, seconds]) for _ in range(2))
        self.scaled = Scaled(self.grads)

    def calls(self, name: str, ours: Call, peer: Call, copies: bool = False) -> Calls:
        """Return both sides of the case ``name``; with ``copies``, both write ``halves``."""
        return Calls(ours, peer, partial(self._verify, name, ours, peer, copies))

    def _verify(self, name: str, ours: Call, peer: Call, copies: bool) -> None:
        """Let both take the same step from where one of them is now."""
        for mine, theirs in zip(self.ours.in_float32(), self.theirs.in_float32(), strict=True):
            torch._foreach_copy_(theirs, mine)
        self.scaled.reset(self.grads)
        for model in (self.ours, self.theirs):
            torch._foreach_zero_(model.halves)
        ours()
        peer()
        for mine, theirs in zip(self.ours.in_float32(), self.theirs.in_float32(), strict=True):
            _require_close(mine, theirs, name)
        for model in (self.ours, self.theirs) if copies else ():
            for half, weight in zip(model.halves, model.weights, strict=True):
                if not torch.equal(half, weight.half()):
                    raise AssertionError(f"{name}: a float16 weight is not the float32 one, rounded")


class Scaled:
    """Gradients of peers that unscale them in place: halved and doubled in turns, so that they stay what they are."""

    def __init__(self, grads: Tensors) -> None:
        self.grads = [grad.clone() for grad in grads]
        self.scale = LOSS_SCALE

    def unscale(self) -> None:
        torch._foreach_mul_(self.grads, 1.0 / self.scale)
        self.turn()

    def turn(self) -> None:
        self.scale = 1.0 / self.scale

    def reset(self, grads: Tensors) -> None:
        torch._foreach_copy_(self.grads, grads)
        self.scale = LOSS_SCALE


def _require_close(got: Tensors, wanted: Tensors, what: str) -> None:
    for one, other in zip(got, wanted, strict=True):
        error = torch.linalg.vector_norm(one - other, math.inf)
        if not error <= _TOLERANCE * torch.linalg.vector_norm(other, math.inf):  # NaN is not
            raise AssertionError(f"{what}: differs from torch's by up to {float(error)}")


def _norms(arrays: Arrays) -> Calls:
    grads, scratch = arrays.grads, kernels.Scratch()

    def ours() -> torch.Tensor:
        squares: torch.Tensor = kernels.squared_norms(grads, scratch=scratch)
        return squares

    def peer() -> Tensors:
        return list(torch._foreach_norm(grads))

    def verify() -> None:
        wanted = torch.stack([grad.double().square().sum() for grad in grads])
        for got, tolerance in ((ours(), 1e-12), (torch.stack(peer()).square(), 1e-4)):
            if not torch.allclose(got.double(), wanted, rtol=tolerance, atol=0.0):
                raise AssertionError("squared norms: wrong")

    return Calls(ours, peer, verify)


def _momentum(arrays: Arrays, lars: bool) -> Calls:
    models = arrays.once(Models)
    mine, theirs, grads = models.ours, models.theirs, models.grads
    scratch, norms_scratch = kernels.Scratch(), kernels.Scratch()
    options: dict[str, Any] = {"lr": _LR, "momentum": _MOMENTUM, "weight_decay": 0.0 if lars else _DECAY}
    theirs_too: dict[str, Any] = {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}

    def ours() -> None:
        rates = None
        if lars:
            rates = _trusts(kernels.squared_norms([*mine.weights, *grads], scratch=norms_scratch).sqrt())
        more: dict[str, Any] = {"rates": rates, "copies": mine.halves, "scratch": scratch}
        kernels.momentum_step(mine.weights, grads, mine.firsts, **options, **more)

    def peer() -> None:
        scaled = grads
        if lars:
            rates = _trusts(torch.stack(torch._foreach_norm([*theirs.weights, *grads])))
            # A launch each: torch's fast path wants factors that the host knows, and learning them would be a wait.
            scaled = list(torch._foreach_mul(grads, list(rates.unbind())))
        torch._fused_sgd_(theirs.weights, scaled, theirs.firsts, **options, **theirs_too)
        torch._foreach_copy_(theirs.halves, theirs.weights)

    return models.calls("LARS" if lars else "SGD", ours, peer, copies=True)


def _trusts(norms: torch.Tensor) -> torch.Tensor:
    """Turn norms of weights and of gradients into a factor for each pair."""
    weights, grads = norms.chunk(2)
    return _TRUST * weights / grads


def _adam(arrays: Arrays, unscale: bool) -> Calls:
    models = arrays.once(Models)
    mine, theirs, scratch = models.ours, models.theirs, kernels.Scratch()
    moments = kernels.Moments(_BETAS, _EPS, int(NUM_STEPS))
    steps = [torch.full((), NUM_STEPS, device=arrays.device) for _ in arrays.shapes]
    options: dict[str, Any] = {"lr": _LR, "weight_decay": _DECAY}
    betas: dict[str, Any] = {"beta1": _BETAS[0], "beta2": _BETAS[1]}
    theirs_options: dict[str, Any] = {**options, **betas, "eps": _EPS, "amsgrad": False, "maximize": False}
    factor = 1.0 / LOSS_SCALE if unscale else 1.0

    def ours() -> None:
        more: dict[str, Any] = {"moments": moments, "scale": factor, "copies": mine.halves, "scratch": scratch}
        kernels.adam_step(mine.weights, models.grads, mine.firsts, mine.seconds, **options, **more)

    def peer() -> None:
        if unscale:
            models.scaled.unscale()
        grads = models.scaled.grads if unscale else models.grads
        torch._fused_adam_(theirs.weights, grads, theirs.firsts, theirs.seconds, [], steps, **theirs_options)
        torch._foreach_copy_(theirs.halves, theirs.weights)

    return models.calls("Adam", ours, peer, copies=True)
