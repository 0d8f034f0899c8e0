"""Steps by kernels for torch's optimizers: the numbers, and the state, are torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import pycomm
from pycomm.optim import plans
from tests.optim.stepping import (
    Make,
    Params,
    assert_near,
    errors,
    give_gradients,
    look_of,
    parameters,
    saved,
    snapshot,
    take_steps,
)

CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sgd": (SGD, {}),
    "sgd decay maximize": (SGD, {"weight_decay": 0.1, "maximize": True}),
    "sgd momentum": (SGD, {"momentum": 0.9}),
    "sgd dampening": (SGD, {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd nesterov": (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd nesterov maximize": (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "sgd full dampening": (SGD, {"momentum": 0.9, "dampening": 1.0}),
    "adam": (Adam, {}),
    "adam decay": (Adam, {"weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}),
    "adam amsgrad": (Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adam maximize": (Adam, {"amsgrad": True, "maximize": True}),
    "adam no betas": (Adam, {"betas": (0.0, 0.0)}),
    "adamw": (AdamW, {"weight_decay": 0.1}),
    "adamw amsgrad": (AdamW, {"amsgrad": True, "weight_decay": 0.3, "maximize": True}),
    "rmsprop": (RMSprop, {"eps": 1e-3}),
    "rmsprop momentum": (RMSprop, {"momentum": 0.5, "weight_decay": 0.1, "alpha": 0.9}),
    "rmsprop centered": (RMSprop, {"centered": True, "alpha": 0.9}),
    "rmsprop all": (RMSprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    "adagrad": (Adagrad, {"lr": 0.2}),
    "adagrad all": (
        Adagrad,
        {
            "lr": 0.2,
            "lr_decay": 0.01,
            "weight_decay": 0.1,
            "initial_accumulator_value": 0.5,
            "eps": 1e-3,
            "maximize": True,
        },
    ),
}


def make(name: str, **more: Any) -> Make:
    """Two groups, the second with a rate and a decay of its own."""
    cls, options = CASES[name]
    options = {"lr": 0.01, **options, **more}
    second = {"lr": 2 * options["lr"], "weight_decay": options.get("weight_decay", 0.0) / 2}

    def build(params: Params) -> Any:
        return cls([{"params": params[:2]}, {"params": params[2:], **second}], **options)

    return build


def run(build: Make, steps: int, dtype: torch.dtype, fuse: bool) -> Params:
    params = parameters(dtype)
    optimizer = build(params)
    if fuse:
        pycomm.fuse(optimizer)
    take_steps(optimizer, range(steps))
    return params


@functools.cache
def torch_run(name: str, steps: int) -> Params:
    return run(make(name), steps, torch.float64, fuse=False)


@pytest.mark.parametrize("name", CASES)
def test_as_torch_in_float64(name: str) -> None:
    wanted = torch_run(name, 200)
    assert_near(run(make(name), 200, torch.float64, fuse=True), wanted, 1e-12)
    # Not because nothing has happened.
    for before, after in zip(parameters()[:4], wanted, strict=False):
        assert (after - before).norm() > 0.01 * before.norm()


@pytest.mark.parametrize("name", CASES)
def test_float32_near_torch_in_float64(name: str) -> None:
    wanted = torch_run(name, 200)
    actual = errors(run(make(name), 200, torch.float32, fuse=True), wanted)
    over_hosts = errors(run(make(name), 200, torch.float32, fuse=False), wanted)
    for ours, theirs in zip(actual, over_hosts, strict=True):
        # More where float32 itself cannot: AdamW's 1 - lr * decay is rounded, and two hundred times alike.
        assert ours <= max(1e-6, 1.5 * theirs)


@pytest.mark.parametrize("name", CASES)
def test_state_is_torchs(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        plain, kernel = make(name)(parameters(dtype)), make(name)(parameters(dtype))
        pycomm.fuse(kernel)
        assert look_of(kernel.state_dict()) == look_of(plain.state_dict())
        for optimizer in (plain, kernel):
            take_steps(optimizer, range(1))
        assert look_of(kernel.state_dict()) == look_of(plain.state_dict())
        for optimizer in (plain, kernel):
            take_steps(optimizer, range(1, 8))
        assert look_of(kernel.state_dict()) == look_of(plain.state_dict())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("to_kernel", [True, False])
def test_checkpoints_go_both_ways(name: str, to_kernel: bool) -> None:
    wanted = torch_run(name, 20)
    first, second = make(name)(parameters()), make(name)(parameters())
    pycomm.fuse(second if to_kernel else first)
    take_steps(first, range(10))
    for group, other in zip(first.param_groups, second.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            q.data.copy_(p.data)
    second.load_state_dict(saved(first.state_dict()))
    take_steps(second, range(10, 20))
    assert_near([p for group in second.param_groups for p in group["params"]], wanted, 1e-12)


@pytest.mark.parametrize("build", [SGD, Adam, AdamW, RMSprop, Adagrad])
def test_learning_rate_as_tensor(build: Callable[..., torch.optim.Optimizer]) -> None:
    def change_halfway(fuse: bool) -> Params:
        params = parameters()
        optimizer = build(params, lr=torch.tensor(0.1, dtype=torch.float64), foreach=False)
        if fuse:
            pycomm.fuse(optimizer)
        take_steps(optimizer, range(5))
        optimizer.param_groups[0]["lr"].fill_(0.03)
        take_steps(optimizer, range(5, 10))
        return params

    assert_near(change_halfway(True), change_halfway(False), 1e-12)


@pytest.mark.parametrize("name", ["sgd nesterov", "adam amsgrad", "rmsprop all", "adagrad all"])
def test_param_group_added_later(name: str) -> None:
    def grow(fuse: bool) -> Params:
        first, later = parameters(), parameters(seed=1)
        optimizer = make(name)(first)
        if fuse:
            pycomm.fuse(optimizer)
        take_steps(optimizer, range(4))
        optimizer.add_param_group({"params": later, "lr": 0.1})
        take_steps(optimizer, range(4, 12))
        return [*first, *later]

    assert_near(grow(True), grow(False), 1e-12)


def test_parameters_of_both_dtypes() -> None:
    def mix(fuse: bool) -> Params:
        params = [*parameters(torch.float32), *parameters(torch.float64, seed=1)]
        optimizer = Adam(params, lr=0.01)
        if fuse:
            pycomm.fuse(optimizer)
        take_steps(optimizer, range(5))
        return params

    wanted = mix(False)
    assert_near(mix(True)[:6], wanted[:6], 1e-6)
    assert_near(mix(True)[6:], wanted[6:], 1e-12)


@pytest.mark.parametrize("name", ["sgd momentum", "adam amsgrad", "rmsprop all", "adagrad all"])
def test_state_in_another_memory_order(name: str) -> None:
    """State stays right when the model becomes channels_last, or a checkpoint is loaded, after it was made."""

    def reorder(fuse: bool) -> Params:
        params = [nn.Parameter(parameters()[2].detach().contiguous())]
        cls, options = CASES[name]
        optimizer = cls(params, **{"lr": 0.01, **options})
        if fuse:
            pycomm.fuse(optimizer)
        take_steps(optimizer, range(3))
        params[0].data = params[0].data.to(memory_format=torch.channels_last)
        take_steps(optimizer, range(3, 6))
        return params

    assert_near(reorder(True), reorder(False), 1e-12)


def test_scratch_memory_does_not_grow() -> None:
    """Parameters whose counts of steps differ are stepped apart, each time under other counts."""
    optimizer = Adam(parameters())
    pycomm.fuse(optimizer)
    take_steps(optimizer, range(10))
    before = len(plans._memories[optimizer]._scratches)
    take_steps(optimizer, range(10, 60))
    assert len(plans._memories[optimizer]._scratches) <= before


def test_state_of_another_shape() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = SGD([param], lr=0.1, momentum=0.9)
    pycomm.fuse(optimizer)
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.ones(3)}}  # would broadcast
    optimizer.load_state_dict(state)
    param.grad = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"'momentum_buffer' has shape \[3\], its parameter \[2, 3\]"):
        optimizer.step()


def test_gradients_are_left_alone() -> None:
    params = parameters()
    optimizer = SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, maximize=True)
    pycomm.fuse(optimizer)
    give_gradients(params, 0)
    given = {i: p.grad for i, p in enumerate(params) if p.grad is not None}
    before = dict(zip(given, snapshot(given.values()), strict=True))
    optimizer.step()
    for i, grad in given.items():
        assert params[i].grad is grad
        assert torch.equal(grad, before[i])


def test_nothing_to_do() -> None:
    params = parameters()
    before = snapshot(params)
    optimizer = Adam(params)
    pycomm.fuse(optimizer)
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert optimizer.state_dict()["state"] == {}
