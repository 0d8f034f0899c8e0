"""The steps of optimizers that ``bench.gpu`` measures, with a float16 copy of the new weights; see gpu_cases.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.gpu_cases import Copy, Plan, Source
from bench.resnet50 import Shape
from pycomm import kernels

_LR, _MOMENTUM, _DECAY, _TRUST = 1e-3, 0.9, 1e-4, 1e-3
_BETAS, _EPS = (0.9, 0.999), 1e-8
_STEP = 10  # of every call: what it costs does not depend on it


def make_plans(shapes: Sequence[Shape]) -> list[Plan]:
    """All of them, for parameters of these shapes."""
    n, of = sum(math.prod(shape) for shape in shapes), f"{len(shapes)} parameters of ResNet-50"
    norms = "_foreach_norm"
    return [
        Plan(f"squared_norms of {of}", n, 4 * n, norms, _copies(_norms, shapes)),
        Plan(f"momentum_step of {of}", n, 22 * n, "_fused_sgd_ + _foreach_copy_", _copies(_momentum, shapes)),
        Plan(
            f"LARS: squared_norms + momentum_step of {of}",
            n,
            30 * n,
            f"{norms} + _foreach_mul + _fused_sgd_ + _foreach_copy_",
            _copies(partial(_momentum, lars=True), shapes),
        ),
        Plan(f"adam_step of {of}", n, 30 * n, "_fused_adamw_ + _foreach_copy_", _copies(_adam, shapes)),
    ]


def _copies(one: Callable[..., Copy], shapes: Sequence[Shape]) -> Callable[[Source, int], list[Copy]]:
    def make(source: Source, count: int) -> list[Copy]:
        return [one(source, shapes) for _ in range(count)]

    return make


class _Model:
    """Weights with what an optimizer keeps of each, twice: both sides step in place."""

    def __init__(self, source: Source, shapes: Sequence[Shape], num_states: int) -> None:
        self.grads = [source.normal(shape) for shape in shapes]
        start = [[source.normal(shape) for shape in shapes], *([torch.zeros_like(g) for g in self.grads],) * num_states]
        self.ours = [[array.clone() for array in arrays] for arrays in start]
        self.theirs = [[array.clone() for array in arrays] for arrays in start]
        self.copies = [weight.half() for weight in self.ours[0]]
        self.their_copies = [copy.clone() for copy in self.copies]

    def verify(self, ours: Callable[[], object], peer: Callable[[], object], what: str) -> None:
        """From where one of them is now, both take the same step."""
        for mine, theirs in zip(self.ours, self.theirs, strict=True):
            torch._foreach_copy_(theirs, mine)
        torch._foreach_zero_(self.copies)
        ours()
        peer()
        for mine, theirs in zip(self.ours, self.theirs, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                if not torch.allclose(one, other, rtol=1e-5, atol=1e-6):
                    raise AssertionError(f"{what}: differs from torch's by {(one - other).abs().max()}")
        for copy, weight in zip(self.copies, self.ours[0], strict=True):
            if not torch.equal(copy, weight.half()):
                raise AssertionError(f"{what}: a copy is not the weight")


def _norms(source: Source, shapes: Sequence[Shape]) -> Copy:
    tensors, scratch = [source.normal(shape) for shape in shapes], kernels.Scratch()

    def ours() -> torch.Tensor:
        squares: torch.Tensor = kernels.squared_norms(tensors, scratch=scratch)
        return squares

    def peer() -> object:
        return torch._foreach_norm(tensors)

    def verify() -> None:
        wanted = torch.stack([tensor.double().square().sum() for tensor in tensors])
        if not torch.allclose(ours().double(), wanted, rtol=1e-12, atol=0.0):
            raise AssertionError("squared_norms: wrong")

    return Copy(ours, peer, verify)


def _momentum(source: Source, shapes: Sequence[Shape], lars: bool = False) -> Copy:
    model, scratch = _Model(source, shapes, 1), kernels.Scratch()
    norms_scratch = kernels.Scratch()
    (weights, buffers), (their_weights, their_buffers) = model.ours, model.theirs
    options: dict[str, Any] = {"lr": _LR, "momentum": _MOMENTUM, "weight_decay": 0.0 if lars else _DECAY}

    def ours() -> None:
        rates = None
        if lars:
            norms = kernels.squared_norms([*weights, *model.grads], scratch=norms_scratch).sqrt()
            rates = _TRUST * norms[: len(weights)] / norms[len(weights) :]
        kernels.momentum_step(
            weights, model.grads, buffers, **options, rates=rates, copies=model.copies, scratch=scratch
        )

    def peer() -> None:
        grads = model.grads
        if lars:
            norms = torch.stack(torch._foreach_norm([*their_weights, *grads]))
            rates = _TRUST * norms[: len(grads)] / norms[len(grads) :]
            grads = list(torch._foreach_mul(grads, list(rates.unbind())))
        more: dict[str, Any] = {"dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
        torch._fused_sgd_(their_weights, grads, their_buffers, **options, **more)
        torch._foreach_copy_(model.their_copies, their_weights)

    return Copy(ours, peer, lambda: model.verify(ours, peer, "momentum_step"))


def _adam(source: Source, shapes: Sequence[Shape]) -> Copy:
    model, scratch = _Model(source, shapes, 2), kernels.Scratch()
    (weights, firsts, seconds), theirs = model.ours, model.theirs
    moments = kernels.Moments(_BETAS, _EPS, _STEP)
    steps = [torch.full((), float(_STEP), device=source.device) for _ in shapes]

    def ours() -> None:
        options: dict[str, Any] = {"lr": _LR, "moments": moments, "weight_decay": _DECAY, "decoupled": True}
        kernels.adam_step(weights, model.grads, firsts, seconds, **options, copies=model.copies, scratch=scratch)

    def peer() -> None:
        options: dict[str, Any] = {
            "lr": _LR,
            "beta1": _BETAS[0],
            "beta2": _BETAS[1],
            "weight_decay": _DECAY,
            "eps": _EPS,
        }
        torch._fused_adamw_(
            theirs[0], model.grads, theirs[1], theirs[2], [], steps, **options, amsgrad=False, maximize=False
        )
        torch._foreach_copy_(model.their_copies, theirs[0])

    return Copy(ours, peer, lambda: model.verify(ours, peer, "adam_step"))
