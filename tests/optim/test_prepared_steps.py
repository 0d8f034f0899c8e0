"""Kernel calls that are prepared once: when they are used again, what they keep, and what they refuse."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

import pycomm
from pycomm.optim import plans
from tests.optim.stepping import Params, assert_near, fresh_gradients, small_parameters, take_steps
from tests.optim.test_between_steps import BUILDS

Change = Callable[[Optimizer, Params, int], None]


def no_change(optimizer: Optimizer, params: Params, step: int) -> None:
    pass


def small_adam(params: Params) -> Optimizer:
    return Adam(params, lr=0.01)


def require_as_torch(
    build: Callable[[Params], Optimizer], steps: int, before: Change = no_change, after: Change = no_change
) -> None:
    """Requires the same parameters with and without ``fuse``, whatever is changed before and after each step."""

    def train(fuse: bool) -> Params:
        params = small_parameters()
        optimizer = build(params)
        if fuse:
            pycomm.fuse(optimizer)
        for step in range(steps):
            fresh_gradients(params, step)
            before(optimizer, params, step)
            optimizer.step()
            after(optimizer, params, step)
        return params

    assert_near(train(True), train(False), 1e-12)


@pytest.mark.parametrize("name", BUILDS)
def test_parameters_frozen_in_turns(name: str, made: list[plans.StepPlan]) -> None:
    """Their step counts drift apart; plans are kept for both sets of parameters."""

    def drop_some(_: Optimizer, params: Params, step: int) -> None:
        for p in params[step % 2 :: 4]:
            p.grad = None

    require_as_torch(BUILDS[name], 20, before=drop_some)
    assert len(made) <= 5


def test_many_sets_of_gradients(made: list[plans.StepPlan]) -> None:
    """More than are kept: each is planned anew, and right."""

    def drop_one(_: Optimizer, params: Params, step: int) -> None:
        params[step % 6].grad = None

    require_as_torch(small_adam, 24, before=drop_one)
    assert len(made) > 6


def test_deleted_gradients_and_states_are_not_kept(made: list[plans.StepPlan]) -> None:
    params = small_parameters()
    optimizer = Adam(params, lr=0.01)
    pycomm.fuse(optimizer)
    for step in range(3):
        fresh_gradients(params, step)
        optimizer.step()
    assert len(made) == 1
    grads = [weakref.ref(p.grad) for p in params if p.grad is not None]
    states = [weakref.ref(entry["exp_avg"]) for entry in optimizer.state.values()]
    optimizer.zero_grad()
    optimizer.state.clear()
    gc.collect()
    assert all(ref() is None for ref in (*grads, *states))
    kept = weakref.ref(params.pop())
    optimizer.param_groups[0]["params"].pop()
    assert kept() is None


def test_autograd_notices_later_steps_too(made: list[plans.StepPlan]) -> None:
    for fuse in (pycomm.fuse, pycomm.master_weights):
        dtype = torch.float16 if fuse is pycomm.master_weights else torch.float32
        params = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
        optimizer = Adam(params)
        fuse(optimizer)
        params[0].grad = torch.ones(3, dtype=dtype)
        made.clear()
        for _ in range(4):
            before = [p._version for p in params]
            optimizer.step()
            assert params[0]._version > before[0]
            assert params[1]._version == before[1]
        assert len(made) == 1


def misfit(optimizer: Any, param: Any, what: str) -> None:
    """Give a prepared parameter a gradient, or data, that does not fit."""
    if what == "sparse":
        param.grad = torch.ones(4, 3).to_sparse()
    elif what == "shorter data":
        param.data = torch.ones(2, 3)
    elif what == "state of another shape":
        optimizer.state[param]["exp_avg"] = torch.ones(12)
    elif what == "shared memory":
        param.grad = param.data
    elif what == "negated state":
        optimizer.state[param]["exp_avg"] = torch._neg_view(optimizer.state[param]["exp_avg"])
    elif what == "gradient of another size":
        param.grad.data = torch.ones(7)
    elif what == "data with gaps":
        param.data = torch.ones(4, 6)[:, ::2]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sparse", r"a gradient of shape \[4, 3\] is sparse; fused steps need dense ones"),
        ("shorter data", r"'exp_avg' has shape \[4, 3\], its parameter \[2, 3\]"),
        ("state of another shape", r"'exp_avg' has shape \[12\], its parameter \[4, 3\]"),
        ("shared memory", r"weights\[1\] overlaps grads\[1\], wanted an array of its own to write to"),
        ("negated state", r"exp_avgs\[1\] has its conj or neg bit set, wanted an array to write to"),
        ("gradient of another size", r"grads\[1\] has 7 elements, wanted 12: as its weight has"),
        ("data with gaps", r"a parameter of shape \[4, 3\] has gaps or overlaps in memory"),
    ],
)
def test_errors_after_good_steps(what: str, message: str) -> None:
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4, 3))]
    optimizer = Adam(params)
    pycomm.fuse(optimizer)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    before = params[0].detach().clone()
    misfit(optimizer, params[1], what)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_gradients_of_any_make(made: list[plans.StepPlan]) -> None:
    """Transposed, expanded, of another dtype, with a lazy negation: each is taken for what it is, and not kept."""
    one = torch.arange(1.0, 10.0, dtype=torch.float64).view(3, 3)
    imaginary = torch.view_as_complex(torch.stack([torch.zeros_like(one), -one], -1)).conj().imag
    assert imaginary.is_neg()
    kinds = [one, one.t(), one[0].expand(3, 3), one, one.clone().t().contiguous(), imaginary, one]

    def train(fuse: bool) -> Params:
        params = [nn.Parameter(torch.ones(3, 3, dtype=torch.float64)), nn.Parameter(torch.ones(1, dtype=torch.float64))]
        optimizer = Adam(params, lr=0.1)
        if fuse:
            pycomm.fuse(optimizer)
        for kind in kinds:
            params[0].grad, params[1].grad = kind, imaginary[0, :1]
            optimizer.step()
        return params

    assert_near(train(True), train(False), 1e-12)


def test_counts_of_other_types(made: list[plans.StepPlan]) -> None:
    """Counts may come as float64 or as plain numbers, from elsewhere; and they may be set."""

    def train(count: Callable[[float], Any]) -> Params:
        params = small_parameters()
        optimizer = Adam(params, lr=0.01)
        pycomm.fuse(optimizer)
        for step in range(6):
            fresh_gradients(params, step)
            optimizer.step()
            if step == 2:
                for entry in optimizer.state.values():
                    entry["step"] = count(10.0)
        return params

    wanted = train(lambda n: torch.tensor(n))
    assert len(made) == 1
    for count in (lambda n: torch.tensor(n, dtype=torch.float64), lambda n: n):
        assert_near(train(count), wanted, 0.0)


def test_one_count_set() -> None:
    def set_count(optimizer: Optimizer, params: Params, step: int) -> None:
        if step == 2:
            optimizer.state[params[1]]["step"].fill_(100.0)

    require_as_torch(small_adam, 8, after=set_count)


def test_masters_are_recognized(made: list[plans.StepPlan]) -> None:
    """Half-precision parameters beside others; one is written to, one is moved, and the handle is another."""
    params = [nn.Parameter(torch.ones(5, dtype=torch.float16)), nn.Parameter(torch.ones(5)), *small_parameters()[:1]]
    optimizer = Adam(params, lr=0.01)
    handle = pycomm.master_weights(optimizer)
    for step in range(4):
        fresh_gradients(params, step)
        optimizer.step()
    assert len(made) == 1
    with torch.no_grad():
        params[0].fill_(2.0)
    optimizer.step()
    assert len(made) == 1
    assert torch.allclose(handle.master_of(params[0]), torch.full((5,), 2.0), atol=0.1)
    assert torch.equal(params[0], handle.master_of(params[0]).half())
    params[0].data = params[0].data.clone()
    optimizer.step()
    assert len(made) == 2
    assert torch.equal(params[0], handle.master_of(params[0]).half())
    handle.detach()
    again = pycomm.master_weights(optimizer)
    optimizer.step()
    assert len(made) == 3
    assert torch.equal(params[0], again.master_of(params[0]).half())


def test_scaler_and_awkward_parameters_reuse_plans(made: list[plans.StepPlan]) -> None:
    """Gradients that come and go, or lie in another order, aside."""
    params = small_parameters()
    optimizer = Adam(params, lr=0.01)
    pycomm.fuse(optimizer)
    scaler = pycomm.LossScaler(4.0)
    for step in range(6):
        fresh_gradients(params, step)
        scaler.step(optimizer)
        scaler.update()
    assert len(made) == 1
    awkward = [*params, nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(2)).requires_grad_(False)]
    other = Adam(awkward)
    pycomm.fuse(other)
    for step in range(3):
        fresh_gradients(awkward[:-1], step)
        other.step()
    assert len(made) == 2


_WITHOUT_TABLE = """
import torch
from torch._C import TensorBase
for holder in (torch.Tensor, TensorBase):
    if "__dlpack_c_exchange_api__" in vars(holder):
        del holder.__dlpack_c_exchange_api__
assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
from tests.optim import test_between_steps as here
made = []
for change in (here.nothing, here.load, here.channels_last):
    wanted, _ = here.go(here.BUILDS["adam"], change, False, made)
    actual, _ = here.go(here.BUILDS["adam"], change, True, made)
    here.assert_near(actual, wanted, 1e-12)
plans = here.plans._memories
made, init = [], here.plans.StepPlan.__init__
def counted(self, *arguments):
    init(self, *arguments)
    made.append(self)
here.plans.StepPlan.__init__ = counted
here.go(here.BUILDS["adam"], here.nothing, True, [])
assert len(made) == 1, made
"""


def test_where_torch_has_no_table_of_functions() -> None:
    """Before torch 2.10: attributes are read instead."""
    subprocess.run([sys.executable, "-c", _WITHOUT_TABLE], check=True, timeout=120)


def test_take_steps_on_awkward_gradients() -> None:
    """The mixture of stepping.py, where every step has other gradients."""

    def train(fuse: bool) -> Params:
        params = small_parameters()
        optimizer = AdamW(params, lr=0.01)
        if fuse:
            pycomm.fuse(optimizer)
        take_steps(optimizer, range(30))
        return params

    assert_near(train(True), train(False), 1e-12)
