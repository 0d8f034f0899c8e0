"""The steps of optimizers, for ``bench.kernels``: as users call them, or as the library calls its kernels.

Both sides step a model of their own, from the same weights and states; all cases share the two, so
that a small machine can hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import pycomm
from bench.kernel_cases import Arrays, Case
from pycomm import kernels
from pycomm.optim.fused import RULES
from pycomm.optim.step_override import stepper_of
from pycomm.optim.update_rules import step_by_rule

_SCALE = 2.0  # of the loss; a power of two: both sides then get the same gradients
_MOMENTUM, _DECAY, _TRUST = 0.9, 1e-2, 1e-3
_ADAM = {"lr": 1e-2, "weight_decay": _DECAY}
_LARS = {"lr": 4.0, "momentum": _MOMENTUM, "weight_decay": _DECAY, "trust_coefficient": _TRUST}
_STEPS = 10.0  # taken before
_TOLERANCE = 1e-5  # of a tensor's largest element; steps are a hundred times that and more

Tensors = list[torch.Tensor]


def make_cases(arrays: Arrays) -> list[Case]:
    """All of them, in the order of the table."""
    models = _Models(arrays)
    return [
        _norms(arrays),
        *_lars(models),
        _lamb(models),
        _adam(models),
        _adam_unscaled(models),
        _adam_with_scaler(models),
        _adam_with_copies(models),
        _adam_with_masters(models),
        *_others(models),
    ]


class _Model:
    """Weights in float32, what optimizers keep of each, and weights in float16."""

    def __init__(self, start: Sequence[Tensors]) -> None:
        self.weights, self.firsts, self.seconds = ([t.clone() for t in tensors] for tensors in start)
        self.halves = [weight.half() for weight in self.weights]

    def in_float32(self) -> list[Tensors]:
        return [self.weights, self.firsts, self.seconds]


class _Models:
    """Ours and the peer's."""

    def __init__(self, arrays: Arrays) -> None:
        generator = torch.Generator().manual_seed(2)
        self.count = arrays.count
        self.grads = arrays.grads
        self.half_grads = arrays.views(arrays.half)
        # What is kept in `seconds` are mean squares, which optimizers take the roots of and divide by.
        weights, firsts = ([torch.randn(g.shape, generator=generator) for g in self.grads] for _ in range(2))
        seconds = [torch.rand(g.shape, generator=generator) + 0.5 for g in self.grads]
        self.ours, self.theirs = (_Model([weights, firsts, seconds]) for _ in range(2))
        self.scaled = _Scaled(self.grads)

    def case(
        self,
        name: str,
        ours: Callable[[], object],
        peer_name: str,
        peer: Callable[[], object],
        bytes_each: int,
        copies: bool = False,
    ) -> Case:
        """``bytes_each``: of a parameter, which have to move. ``copies``: both sides write ``halves``."""
        verify = partial(self._verify, name, ours, peer, copies)
        return Case(name, ours, peer_name, peer, bytes_each * self.count, verify)

    def _verify(self, name: str, ours: Callable[[], object], peer: Callable[[], object], copies: bool) -> None:
        """From where one of them is now, both take the same step."""
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


class _Scaled:
    """Gradients of peers that unscale them in place: halved and doubled in turns, so that they stay what they are."""

    def __init__(self, grads: Tensors) -> None:
        self.grads = [grad.clone() for grad in grads]
        self.scale = _SCALE

    def unscale(self) -> None:
        torch._foreach_mul_(self.grads, 1.0 / self.scale)
        self.turn()

    def turn(self) -> None:
        self.scale = 1.0 / self.scale

    def reset(self, grads: Tensors) -> None:
        torch._foreach_copy_(self.grads, grads)
        self.scale = _SCALE


def _require_close(got: Tensors, wanted: Tensors, what: str) -> None:
    for one, other in zip(got, wanted, strict=True):
        error = torch.linalg.vector_norm(one - other, math.inf)
        if not error <= _TOLERANCE * torch.linalg.vector_norm(other, math.inf):  # NaN is not
            raise AssertionError(f"{what}: differs from torch's by up to {float(error)}")


def _make(kind: Any, weights: Tensors, grads: Tensors | None, states: dict[str, Tensors], **options: Any) -> Any:
    """An optimizer of the class ``kind`` that has stepped before, on these very tensors."""
    # .data: written to through others without a trace, as the cases share them.
    params = [torch.nn.Parameter(weight.data) for weight in weights]
    optimizer = kind(params, **options)
    for i, param in enumerate(params):
        param.grad = None if grads is None else grads[i]
        optimizer.state[param] = {"step": torch.tensor(_STEPS), **{key: of[i] for key, of in states.items()}}
    return optimizer


def _moments(model: _Model) -> dict[str, Tensors]:
    return {"exp_avg": model.firsts, "exp_avg_sq": model.seconds}


def _momenta(model: _Model) -> dict[str, Tensors]:
    return {"momentum_buffer": model.firsts}


def _means(model: _Model) -> dict[str, Tensors]:
    return {"square_avg": model.seconds, "momentum_buffer": model.firsts}


def _norms(arrays: Arrays) -> Case:
    scratch = kernels.Scratch()

    def ours() -> torch.Tensor:
        squares: torch.Tensor = kernels.squared_norms(arrays.grads, scratch=scratch)
        return squares

    def peer() -> Tensors:
        return list(torch._foreach_norm(arrays.grads))

    def verify() -> None:
        wanted = torch.stack([grad.double().square().sum() for grad in arrays.grads])
        for got, tolerance in ((ours(), 1e-12), (torch.stack(peer()).square(), 1e-4)):
            if not torch.allclose(got.double(), wanted, rtol=tolerance, atol=0.0):
                raise AssertionError("squared norms: wrong")

    return Case("squared norms", ours, "_foreach_norm", peer, 4 * arrays.count, verify, floor="read")


def _with_copies(models: _Models, kind: Any, states: dict[str, Tensors], factor: float, **options: Any) -> Any:
    """What a step with master weights does after ``LossScaler.unscale_``, when gradients are float32."""
    optimizer = _make(kind, models.ours.halves, None, states, **options)
    params = optimizer.param_groups[0]["params"]
    masters = dict(zip(params, models.ours.weights, strict=True))
    grads = dict(zip(params, models.grads, strict=True))
    rule = RULES[kind]

    @torch.no_grad()
    def step() -> None:
        step_by_rule(optimizer, rule, factor, masters, grads)

    return step


def _lars(models: _Models) -> list[Case]:
    ours, theirs = models.ours, models.theirs
    with_copies = _with_copies(models, pycomm.LARS, _momenta(ours), 1.0, **_LARS)

    def by_torch() -> None:
        _lars_by_torch(theirs, models.grads)
        torch._foreach_copy_(theirs.halves, theirs.weights)

    fused = _make(pycomm.LARS, ours.weights, models.grads, _momenta(ours), **_LARS)
    plain = _make(pycomm.LARS, theirs.weights, models.grads, _momenta(theirs), **_LARS, fused=False)
    peer = "_foreach_norm, _foreach_mul, _foreach_add_, ... + _foreach_copy_"
    return [
        models.case("LARS, copies in fp16", with_copies, peer, by_torch, 30, copies=True),
        models.case("LARS.step", fused.step, "LARS(fused=False).step", plain.step, 28),
    ]


def _lars_by_torch(model: _Model, grads: Tensors) -> None:
    """LARS with operations on many tensors at a time, of which torch has no fused one."""
    norms = torch.stack(torch._foreach_norm([*model.weights, *grads]))
    w, g = norms[: len(grads)], norms[len(grads) :]
    adapted = torch.tensor([weight.dim() > 1 for weight in model.weights])
    decays = torch.where(adapted, _DECAY, 0.0)
    rates = _LARS["lr"] * torch.where(adapted, _TRUST * w / (g + decays * w), 1.0)
    steps = torch._foreach_mul(grads, list(rates))
    torch._foreach_add_(steps, torch._foreach_mul(model.weights, list(rates * decays)))
    torch._foreach_mul_(model.firsts, _MOMENTUM)
    torch._foreach_add_(model.firsts, steps)
    torch._foreach_sub_(model.weights, model.firsts)


def _lamb(models: _Models) -> Case:
    ours, theirs = models.ours, models.theirs
    fused = _make(pycomm.LAMB, ours.weights, models.grads, _moments(ours), **_ADAM)
    plain = _make(pycomm.LAMB, theirs.weights, models.grads, _moments(theirs), **_ADAM, fused=False)
    # Norms come between two passes: w, g, m and v are read, m and v written; then w, m and v read, w written.
    return models.case("LAMB.step", fused.step, "LAMB(fused=False).step", plain.step, 40)


def _fused_adam(models: _Models, grads: Tensors, **options: Any) -> Any:
    theirs = models.theirs
    return _make(torch.optim.Adam, theirs.weights, grads, _moments(theirs), **_ADAM, fused=True, **options)


def _our_adam(models: _Models) -> Any:
    optimizer = _make(torch.optim.Adam, models.ours.weights, models.grads, _moments(models.ours), **_ADAM)
    pycomm.fuse(optimizer)
    return optimizer


def _unscaled_step(optimizer: Any) -> Callable[[], None]:
    """As ``LossScaler.step`` does it: the factor is left to the step."""
    stepper = stepper_of(optimizer)

    def step() -> None:
        stepper.leave_factor(1.0 / _SCALE)
        optimizer.step()

    return step


def _adam(models: _Models) -> Case:
    peer = _fused_adam(models, models.grads)
    return models.case("Adam.step", _our_adam(models).step, "Adam(fused=True).step", peer.step, 28)


def _adam_unscaled(models: _Models) -> Case:
    optimizer, scaled = _fused_adam(models, models.scaled.grads), models.scaled

    def peer() -> None:
        scaled.unscale()
        optimizer.step()

    ours = _unscaled_step(_our_adam(models))
    return models.case("Adam.step, unscale", ours, "_foreach_mul_ + Adam(fused=True).step", peer, 28)


def _adam_with_scaler(models: _Models) -> Case:
    """Both look whether gradients are finite first, which is a pass of its own."""
    our_adam, optimizer, scaled = _our_adam(models), _fused_adam(models, models.scaled.grads), models.scaled
    our_scaler = pycomm.LossScaler(_SCALE, dynamic=False)
    scaler = torch.amp.GradScaler("cpu", _SCALE)
    scaler.scale(torch.zeros(()))  # makes the scale a tensor

    def ours() -> None:
        our_scaler.step(our_adam)
        our_scaler.update()

    def peer() -> None:
        scaler.update(scaled.scale)  # here, not behind: other cases have turned it
        scaler.step(optimizer)
        scaled.turn()  # torch's fused step leaves the gradients unscaled

    return models.case("Adam.step, finite check, unscale", ours, "GradScaler.step(Adam(fused=True))", peer, 32)


def _adam_with_copies(models: _Models) -> Case:
    optimizer, scaled, theirs = _fused_adam(models, models.scaled.grads), models.scaled, models.theirs

    def peer() -> None:
        scaled.unscale()
        optimizer.step()
        torch._foreach_copy_(theirs.halves, theirs.weights)

    ours = _with_copies(models, torch.optim.Adam, _moments(models.ours), 1.0 / _SCALE, **_ADAM)
    peer_name = "_foreach_mul_ + Adam(fused=True).step + _foreach_copy_"
    return models.case("Adam, unscale, copies in fp16", ours, peer_name, peer, 30, copies=True)


def _adam_with_masters(models: _Models) -> Case:
    """Parameters and gradients in float16."""
    ours, theirs, scaled = models.ours, models.theirs, models.scaled
    narrow = _make(torch.optim.Adam, ours.halves, models.half_grads, _moments(ours), **_ADAM)
    for master, weight in zip(pycomm.master_weights(narrow).parameters(), ours.weights, strict=True):
        master.data = weight.data
    optimizer = _fused_adam(models, scaled.grads)

    def peer() -> None:
        scaled.reset(models.half_grads)
        scaled.unscale()
        optimizer.step()
        torch._foreach_copy_(theirs.halves, theirs.weights)

    peer_name = "_foreach_copy_ + _foreach_mul_ + Adam(fused=True).step + _foreach_copy_"
    name = "Adam.step, unscale, master weights of fp16"
    return models.case(name, _unscaled_step(narrow), peer_name, peer, 28, copies=True)


def _others(models: _Models) -> list[Case]:
    sgd = {"lr": 1e-2, "momentum": _MOMENTUM, "weight_decay": _DECAY}
    return [
        _plain(models, torch.optim.AdamW, _moments, "fused", 28, _ADAM),
        _plain(models, torch.optim.RMSprop, _means, "foreach", 28, {**sgd, "alpha": 0.99}),
        _plain(models, torch.optim.SGD, _momenta, "fused", 20, sgd),
    ]


def _plain(
    models: _Models,
    kind: Any,
    states: Callable[[_Model], dict[str, Tensors]],
    variant: str,
    bytes_each: int,
    options: dict[str, float],
) -> Case:
    """Against the fastest ``variant`` that torch has of the same optimizer."""
    ours = _make(kind, models.ours.weights, models.grads, states(models.ours), **options)
    pycomm.fuse(ours)
    peer = _make(kind, models.theirs.weights, models.grads, states(models.theirs), **options, **{variant: True})
    name = f"{kind.__name__}.step{', momentum' if 'momentum' in options else ''}"
    return models.case(name, ours.step, f"{kind.__name__}({variant}=True).step", peer.step, bytes_each)
