"""A fused optimizer is an optimizer still: schedulers, hooks, closures, copies, GradScaler; and what it refuses."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop, lr_scheduler

import pycomm
from pycomm.optim.step_override import step_override_of
from tests.optim.stepping import assert_near, give_gradients, parameters, snapshot, take_steps

Fuse = Callable[[Any], Any]
FUSES = [pycomm.fuse, pycomm.master_weights]


def one_parameter() -> nn.Parameter:
    param = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    param.grad = torch.ones(3)
    return param


def detach(optimizer: torch.optim.Optimizer) -> None:
    taken = step_override_of(optimizer)
    assert taken is not None
    taken.detach()


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("before", [True, False])
def test_schedulers(fuse: Fuse, before: bool) -> None:
    """Warnings are errors here."""
    param = one_parameter()
    optimizer = SGD([param], lr=1.0)
    if not before:
        fuse(optimizer)
    schedulers = [lr_scheduler.StepLR(optimizer, 2, 0.5), lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.5)]
    if before:
        fuse(optimizer)
    schedulers.append(lr_scheduler.ExponentialLR(optimizer, 1.0))
    for _ in range(4):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    traveled = 1 + 1 / 2 + 1 / 8 + 1 / 16
    assert param.tolist() == [1 - traveled, 2 - traveled, 3 - traveled]


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("before", [True, False])
def test_scheduler_before_optimizer_is_noticed(fuse: Fuse, before: bool) -> None:
    optimizer = SGD([one_parameter()], lr=1.0)
    if not before:
        fuse(optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    if before:
        fuse(optimizer)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("before", [True, False])
def test_detach_leaves_schedulers_alone(fuse: Fuse, before: bool) -> None:
    param, calls = one_parameter(), []
    optimizer = SGD([param], lr=1.0)
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    if not before:
        fuse(optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    if before:
        fuse(optimizer)
    for _ in range(2):  # and taken over again
        detach(optimizer)
        assert step_override_of(optimizer) is None
        optimizer.step()
        fuse(optimizer)
    detach(optimizer)
    scheduler.step()
    assert calls == ["hook"] * 2
    assert param.tolist() == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("fuse", FUSES)
def test_hooks_run_once_in_order(fuse: Fuse) -> None:
    calls: list[str] = []
    param = one_parameter()
    optimizer = SGD([param], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 5)

    def hook(name: str) -> Callable[..., None]:
        return lambda which, args, kwargs: calls.append(f"{name} {param[0].item():g} {which is optimizer}")

    optimizer.register_step_pre_hook(hook("pre"))
    fuse(optimizer)
    optimizer.register_step_pre_hook(hook("second"))
    optimizer.register_step_post_hook(hook("post"))
    optimizer.step()
    scheduler.step()
    assert calls == ["pre 1 True", "second 1 True", "post 0 True"]
    detach(optimizer)
    optimizer.step()
    assert calls[3:] == ["pre 0 True", "second 0 True", "post -1 True"]


@pytest.mark.parametrize("fuse", FUSES)
def test_closures(fuse: Fuse) -> None:
    param = one_parameter()
    optimizer = SGD([param], lr=0.5)
    fuse(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = (3 * param).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 18.0
        assert optimizer.step(closure=closure).item() == 18.0 - 3 * 4.5
    assert param.tolist() == [-2.0, -1.0, 0.0]

    def failing() -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(failing)
    assert param.tolist() == [-2.0, -1.0, 0.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("build", [SGD, functools.partial(SGD, momentum=0.9), Adam, AdamW, RMSprop])
def test_copies_are_ordinary_optimizers(build: Callable[..., Any], duplicate: Callable[[Any], Any]) -> None:
    optimizer = build(parameters(), lr=0.01)
    pycomm.fuse(optimizer)
    lr_scheduler.StepLR(optimizer, 5)
    take_steps(optimizer, range(4))
    other = duplicate(optimizer)
    assert type(other) is type(optimizer)
    assert step_override_of(other) is None
    assert "step" not in vars(other)
    params = other.param_groups[0]["params"]
    assert params[0] is not optimizer.param_groups[0]["params"][0]
    take_steps(other, range(4, 8))
    take_steps(optimizer, range(4, 8))
    assert_near(optimizer.param_groups[0]["params"], params, 1e-12)
    handle = pycomm.fuse(other)
    assert step_override_of(other) is handle


@pytest.mark.parametrize("build", [functools.partial(SGD, momentum=0.9), Adam, AdamW, RMSprop])
def test_detach_and_go_on(build: Callable[..., Any]) -> None:
    def go(fuse: bool) -> list[nn.Parameter]:
        params = parameters()
        optimizer = build(params, lr=0.01)
        for start in (0, 4, 8):
            if fuse and start != 4:
                pycomm.fuse(optimizer)
            take_steps(optimizer, range(start, start + 4))
            if fuse and start != 4:
                detach(optimizer)
            assert "step" not in vars(optimizer)
        return params

    assert_near(go(True), go(False), 1e-12)


def test_detach_is_idempotent() -> None:
    optimizer = SGD([one_parameter()], lr=1.0)
    first = pycomm.fuse(optimizer)
    first.detach()
    second = pycomm.fuse(optimizer)
    first.detach()  # of the first, which has nothing to say any more
    assert step_override_of(optimizer) is second


def test_nothing_keeps_the_optimizer_alive() -> None:
    optimizer = Adam([one_parameter()])
    pycomm.fuse(optimizer)
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("build", [SGD, Adam, AdamW, RMSprop])
def test_autograd_notices(fuse: Fuse, build: Callable[..., Any]) -> None:
    used, unused = one_parameter(), one_parameter()
    unused.grad = None
    loss, other = (used * used).sum(), (unused * unused).sum()
    optimizer = build([used, unused], lr=0.1)
    fuse(optimizer)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    other.backward()


@pytest.mark.parametrize("torchs_fused", [None, True])
@pytest.mark.parametrize("build", [functools.partial(SGD, momentum=0.9), Adam])
def test_grad_scaler(build: Callable[..., Any], torchs_fused: bool | None) -> None:
    """``fused=True`` makes GradScaler leave unscaling, and skipping, to the step."""

    def train(fuse: bool) -> list[nn.Parameter]:
        params = parameters()
        # torch's fused steps take gradients in another memory order than their parameter for what they are not.
        optimizer = build(params, lr=0.01, fused=torchs_fused if fuse else None)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        if fuse:
            pycomm.fuse(optimizer)
        for step in range(8):
            scaler.scale(torch.ones(()))
            give_gradients(params, step)
            with torch.no_grad():
                for p in params:
                    if p.grad is not None:
                        p.grad = p.grad * scaler.get_scale() if step != 3 else torch.full_like(p, torch.inf)
            if step % 2:
                scaler.unscale_(optimizer)
            before = snapshot(params)
            scaler.step(optimizer)
            assert torch.equal(before[0], params[0]) == (step == 3)
            scaler.update()
        assert scaler.get_scale() != 1024.0
        return params

    # GradScaler's reciprocals are float32.
    assert_near(train(True), train(False), 1e-7)


def never(optimizer: Any, closure: Any = None) -> None:
    raise AssertionError("never called")


def test_patched_steps_are_not_dropped() -> None:
    for patch in (never, functools.wraps(SGD.step)(lambda *_: None)):
        optimizer = SGD([one_parameter()], lr=1.0)
        optimizer.step = MethodType(patch, optimizer)  # type: ignore[method-assign]
        for _ in range(2):
            for fuse in FUSES:
                with pytest.raises(RuntimeError, match="SGD has been replaced by"):
                    fuse(optimizer)
            lr_scheduler.StepLR(optimizer, 2)  # whose wrapper hides the patch


@pytest.mark.parametrize("fuse", FUSES)
def test_twice(fuse: Fuse) -> None:
    optimizer = SGD([one_parameter()], lr=1.0)
    fuse(optimizer)
    for _ in range(2):
        for again in FUSES:
            with pytest.raises(RuntimeError, match="the step of this SGD has already been replaced by pycomm's"):
                again(optimizer)
        lr_scheduler.StepLR(optimizer, 2)


def test_what_cannot_be_fused() -> None:
    class MySGD(SGD):
        pass

    param = one_parameter()
    with pytest.raises(
        TypeError, match="optimizer is a torch.optim.adadelta.Adadelta, wanted one of Adagrad, Adam, AdamW,"
    ):
        pycomm.fuse(torch.optim.Adadelta([param]))
    with pytest.raises(TypeError, match="MySGD, wanted one of"):
        pycomm.fuse(MySGD([param], lr=1.0))
    with pytest.raises(TypeError, match="optimizer is a builtins.int, wanted one of"):
        pycomm.fuse(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="differentiable=True"):
        pycomm.fuse(Adam([param], differentiable=True))
    for dtype in (torch.float16, torch.bfloat16, torch.complex64):
        with pytest.raises(TypeError, match=f"dtype {dtype}, wanted float32 or float64: see pycomm.master_weights"):
            pycomm.fuse(SGD([param, nn.Parameter(torch.ones(2, dtype=dtype))], lr=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = SGD([param], lr=1.0)  # nothing is left of the attempts
        pycomm.fuse(optimizer)
    optimizer.step()


def test_what_cannot_be_stepped() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = SGD(table.parameters(), lr=1.0)
    pycomm.fuse(optimizer)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"a gradient of shape \[4, 3\] is sparse"):
        optimizer.step()
    gaps = nn.Parameter(torch.ones(4, 6)[:, ::2])
    gaps.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"a parameter of shape \[4, 3\] has gaps"):
        pycomm.fuse(SGD([gaps], lr=1.0))
