"""Steps of optimizers as users call them, against torch's own and unfused ones.

Both sides step a model of their own, from the same weights and states; all cases share the two, so that a small
machine can hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pycomm
from bench.kernels.case import Arrays, Call, Calls, Case
from bench.kernels.steps import LOSS_SCALE, NUM_STEPS, Model, Models, Tensors
from pycomm.optim.step_override import stepper_of

_MOMENTUM, _DECAY = 0.9, 1e-2
_ADAM = {"lr": 1e-2, "weight_decay": _DECAY}
_LARS = {"lr": 4.0, "momentum": _MOMENTUM, "weight_decay": _DECAY, "trust_coefficient": 1e-3}
_SGD = {"lr": 1e-2, "momentum": _MOMENTUM, "weight_decay": _DECAY}


def make_cases(n: int) -> list[Case]:
    """Return all steps, in the order of the table."""
    unscaled, masters = "Adam.step, unscale", "Adam.step, unscale, master weights of fp16"
    scaler, adam = "GradScaler.step(Adam(fused=True))", "Adam(fused=True).step"
    return [
        Case("LARS.step", "LARS(fused=False).step", 28 * n, _lars),
        # Norms come between two passes: w, g, m and v are read, m and v written; then w, m and v read, w written.
        Case("LAMB.step", "LAMB(fused=False).step", 40 * n, _lamb),
        Case("Adam.step", adam, 28 * n, _adam),
        Case(unscaled, f"_foreach_mul_ + {adam}", 28 * n, _adam_unscaled),
        Case("Adam.step, finite check, unscale", scaler, 32 * n, _adam_with_scaler),
        Case(masters, f"_foreach_copy_ + _foreach_mul_ + {adam} + _foreach_copy_", 28 * n, _adam_with_masters),
        Case("AdamW.step", "AdamW(fused=True).step", 28 * n, _adamw),
        Case("RMSprop.step, momentum", "RMSprop(foreach=True).step", 28 * n, _rmsprop),
        Case("Adagrad.step", "Adagrad(foreach=True).step", 20 * n, _adagrad),
        Case("SGD.step, momentum", "SGD(fused=True).step", 20 * n, _sgd),
    ]


def _make(kind: Any, weights: Tensors, grads: Tensors, states: dict[str, Tensors], **options: Any) -> Any:
    """Return an optimizer of the class ``kind`` that has stepped before, on these very tensors."""
    # .data: written to through others without a trace, as the cases share them.
    params = [torch.nn.Parameter(weight.data) for weight in weights]
    optimizer = kind(params, **options)
    for i, param in enumerate(params):
        param.grad = grads[i]
        # torch's fused steps require the count where the parameter is; all others keep it on the host.
        on_host = kind not in (torch.optim.Adam, torch.optim.AdamW) or not options.get("fused")
        count = torch.tensor(NUM_STEPS, device="cpu" if on_host else param.device)
        optimizer.state[param] = {"step": count, **{key: of[i] for key, of in states.items()}}
    return optimizer


def _moments(model: Model) -> dict[str, Tensors]:
    return {"exp_avg": model.firsts, "exp_avg_sq": model.seconds}


def _momenta(model: Model) -> dict[str, Tensors]:
    return {"momentum_buffer": model.firsts}


def _means(model: Model) -> dict[str, Tensors]:
    return {"square_avg": model.seconds, "momentum_buffer": model.firsts}


def _sums(model: Model) -> dict[str, Tensors]:
    return {"sum": model.seconds}


_States = Callable[[Model], dict[str, Tensors]]


def _by_pycomm(arrays: Arrays, kind: Any, states: _States, options: dict[str, float]) -> Calls:
    """Compare an optimizer of pycomm's with itself, unfused."""
    models = arrays.once(Models)
    fused, plain = (
        _make(kind, model.weights, models.grads, states(model), **options, fused=fused)
        for model, fused in ((models.ours, True), (models.theirs, False))
    )
    return models.calls(f"{kind.__name__}.step", fused.step, plain.step)


def _by_torch(arrays: Arrays, kind: Any, states: _States, variant: str, options: dict[str, float]) -> Calls:
    """Compare an optimizer of torch's that was fused with the fastest ``variant`` that torch has of it."""
    models = arrays.once(Models)
    ours = _make(kind, models.ours.weights, models.grads, states(models.ours), **options)
    pycomm.fuse(ours)
    peer = _make(kind, models.theirs.weights, models.grads, states(models.theirs), **options, **{variant: True})
    return models.calls(f"{kind.__name__}.step", ours.step, peer.step)


def _lars(arrays: Arrays) -> Calls:
    return _by_pycomm(arrays, pycomm.LARS, _momenta, _LARS)


def _lamb(arrays: Arrays) -> Calls:
    return _by_pycomm(arrays, pycomm.LAMB, _moments, _ADAM)


def _adam(arrays: Arrays) -> Calls:
    return _by_torch(arrays, torch.optim.Adam, _moments, "fused", _ADAM)


def _adamw(arrays: Arrays) -> Calls:
    return _by_torch(arrays, torch.optim.AdamW, _moments, "fused", _ADAM)


def _rmsprop(arrays: Arrays) -> Calls:
    return _by_torch(arrays, torch.optim.RMSprop, _means, "foreach", {**_SGD, "alpha": 0.99})


def _adagrad(arrays: Arrays) -> Calls:
    return _by_torch(arrays, torch.optim.Adagrad, _sums, "foreach", _ADAM)


def _sgd(arrays: Arrays) -> Calls:
    return _by_torch(arrays, torch.optim.SGD, _momenta, "fused", _SGD)


def _peer_of_scaled_gradients(models: Models) -> Any:
    """Return torch's fused Adam for the peer's model, with gradients that the peer unscales in place."""
    theirs = models.theirs
    return _make(torch.optim.Adam, theirs.weights, models.scaled.grads, _moments(theirs), **_ADAM, fused=True)


def _our_adam(models: Models) -> Any:
    optimizer = _make(torch.optim.Adam, models.ours.weights, models.grads, _moments(models.ours), **_ADAM)
    pycomm.fuse(optimizer)
    return optimizer


def _unscaled_step(optimizer: Any) -> Call:
    """Return a step as ``LossScaler.step`` takes it: the factor is left to the step."""
    stepper = stepper_of(optimizer)

    def step() -> None:
        stepper.leave_factor(1.0 / LOSS_SCALE)
        optimizer.step()

    return step


def _adam_unscaled(arrays: Arrays) -> Calls:
    models = arrays.once(Models)
    optimizer = _peer_of_scaled_gradients(models)

    def peer() -> None:
        models.scaled.unscale()
        optimizer.step()

    return models.calls("Adam.step, unscale", _unscaled_step(_our_adam(models)), peer)


def _adam_with_scaler(arrays: Arrays) -> Calls:
    """Both look whether gradients are finite first, which is a pass of its own."""
    models = arrays.once(Models)
    our_adam, optimizer, scaled = _our_adam(models), _peer_of_scaled_gradients(models), models.scaled
    our_scaler = pycomm.LossScaler(LOSS_SCALE, dynamic=False)
    scaler = torch.amp.GradScaler(arrays.device.type, LOSS_SCALE)
    scaler.scale(torch.zeros((), device=arrays.device))  # makes the scale a tensor

    def ours() -> None:
        our_scaler.step(our_adam)
        our_scaler.update()

    def peer() -> None:
        scaler.update(scaled.scale)  # here, not behind: other cases have turned it
        scaler.step(optimizer)
        scaled.turn()  # torch's fused step leaves the gradients unscaled

    return models.calls("Adam.step, finite check, unscale", ours, peer)


def _adam_with_masters(arrays: Arrays) -> Calls:
    """Parameters and gradients are in float16."""
    models = arrays.once(Models)
    ours, theirs, scaled = models.ours, models.theirs, models.scaled
    narrow = _make(torch.optim.Adam, ours.halves, models.half_grads, _moments(ours), **_ADAM)
    for master, weight in zip(pycomm.master_weights(narrow).parameters(), ours.weights, strict=True):
        master.data = weight.data
    optimizer = _peer_of_scaled_gradients(models)

    def peer() -> None:
        scaled.reset(models.half_grads)
        scaled.unscale()
        optimizer.step()
        torch._foreach_copy_(theirs.halves, theirs.weights)

    return models.calls("Adam.step, master weights", _unscaled_step(narrow), peer, copies=True)
