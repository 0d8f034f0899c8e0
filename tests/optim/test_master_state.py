"""Checkpoints of master weights, and what scalers and clipping do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import pycomm
from tests.optim.masters import ALL, HALF, make, mixed_model, step_on
from tests.optim.stepping import (
    Params,
    assert_equal,
    assert_near,
    give_gradients,
    parameters,
    saved,
    snapshot,
)


def copy_into(params: Params, values: Sequence[torch.Tensor]) -> None:
    """Copy in place, as model.load_state_dict does."""
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def dtypes_in(value: Any) -> set[torch.dtype]:
    if isinstance(value, (dict, list)):
        return {d for one in (value.values() if isinstance(value, dict) else value) for d in dtypes_in(one)}
    return {value.dtype} if isinstance(value, torch.Tensor) else set()


@pytest.mark.pairwise
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ALL)
def test_resume_bit_for_bit(name: str, dtype: torch.dtype, model_first: bool) -> None:
    params, optimizer, handle = make(name, dtype)
    step_on(optimizer, params, range(5), dtype)
    state, values = saved(optimizer.state_dict()), snapshot(params)
    assert not dtypes_in(state) & set(HALF)
    for i, param in enumerate(params):
        assert torch.equal(state["state"][i]["master_weight"].to(dtype), param)

    other, second, second_handle = make(name, dtype, seed=1)
    if model_first:
        copy_into(other, values)
    second.load_state_dict(state)
    if not model_first:
        copy_into(other, values)
    assert_equal(other, params)
    assert_equal(second_handle.parameters(), snapshot(handle.parameters()))
    for which, its_params in ((optimizer, params), (second, other)):
        step_on(which, its_params, range(5, 10), dtype)
        assert not dtypes_in([which.state[p] for p in its_params]) & set(HALF)
    assert_equal(other, params)
    assert_equal(second_handle.parameters(), snapshot(handle.parameters()))


def trained_and_new(name: str, dtype: torch.dtype) -> Any:
    """Two mixed models, their optimizers with masters, and the handles; the first has been trained for four steps."""
    models = mixed_model(dtype), mixed_model(dtype)
    optimizers = [ALL[name](model.parameters()) for model in models]
    handles = [pycomm.master_weights(optimizer) for optimizer in optimizers]
    step_on(optimizers[0], list(models[0].parameters()), range(4), dtype)
    return models, optimizers, handles


@pytest.mark.parametrize("name", ["AdamW", "Adadelta"])
def test_mixed_models(name: str) -> None:
    (model, other), optimizers, handles = trained_and_new(name, torch.float16)
    state = saved(optimizers[0].state_dict())
    assert ["master_weight" in state["state"][i] for i in range(6)] == [True, True, False, False, True, True]
    other.load_state_dict(model.state_dict())
    optimizers[1].load_state_dict(state)
    for optimizer, m in zip(optimizers, (model, other), strict=True):
        step_on(optimizer, list(m.parameters()), range(4, 8), torch.float16)
    assert_equal(handles[0].parameters(), handles[1].parameters())


def test_state_dict_shows_writes() -> None:
    params, optimizer, _ = make("Adam", torch.bfloat16)
    assert (optimizer.state_dict()["state"][1]["master_weight"] != 5).all()
    with torch.no_grad():
        params[1].fill_(5.0)
    assert (optimizer.state_dict()["state"][1]["master_weight"] == 5).all()


def test_another_models_weights_win_where_they_come_last() -> None:
    params, optimizer, handle = make("Adam", torch.bfloat16)
    step_on(optimizer, params, range(3), torch.bfloat16)
    state, trained = saved(optimizer.state_dict()), snapshot(params)
    copy_into(params, parameters(torch.bfloat16, seed=5))
    assert_equal(handle.masters(), parameters(torch.float32, seed=5))
    optimizer.load_state_dict(state)
    assert_equal(params, trained)


@pytest.mark.parametrize("name", ["SGD", "Adam", "LAMB", "Adadelta", "LBFGS"])
def test_loads_that_fail(name: str) -> None:
    """Leave everything as it was."""
    params, optimizer, handle = make(name, torch.float16)
    step_on(optimizer, params, range(3), torch.float16)
    good = saved(optimizer.state_dict())
    before, masters = snapshot(params), snapshot(handle.masters())
    without, fewer, shapes, number = (saved(good) for _ in range(4))
    del without["state"][1]["master_weight"]
    fewer["param_groups"][0]["params"] = fewer["param_groups"][0]["params"][:-1]
    shapes["state"][0]["master_weight"] = torch.ones(1)
    number["state"][0]["master_weight"] = 1.0
    for state, message in (
        (without, "the state of parameter 1 has no 'master_weight': it was saved without master_weights"),
        (fewer, "doesn't match the size of optimizer's group"),
        ({**good, "param_groups": good["param_groups"] * 2}, "a different number of parameter groups"),
        ({"param_groups": good["param_groups"]}, "state_dict is not of an optimizer: it has no 'state'"),
        ({"state": good["state"]}, "state_dict is not of an optimizer: .* and 'param_groups'"),
        ({}, "state_dict is not of an optimizer"),
        (None, "state_dict is not of an optimizer"),
        (number, "the master weight of parameter 0 is a float"),
        (shapes, r"the master weight of parameter 0 has shape \[1\], wanted \[17, 9\]"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)  # type: ignore[arg-type]
        assert_equal(params, before)
        assert_equal(handle.masters(), masters)
    remove = optimizer.register_load_state_dict_pre_hook(lambda *_: dict[str, Any]()["mine"])
    with pytest.raises(KeyError, match="mine"):
        optimizer.load_state_dict(good)
    remove.remove()
    assert_equal(params, before)
    optimizer.load_state_dict(good)
    assert_equal(handle.masters(), masters)
    step_on(optimizer, params, range(3, 4), torch.float16)


def test_checkpoint_from_before_master_weights() -> None:
    params = parameters(torch.bfloat16)
    plain = torch.optim.Adam(params)
    step_on(plain, params, range(3), torch.bfloat16)
    state = saved(plain.state_dict())
    optimizer = torch.optim.Adam(params)
    optimizer.load_state_dict(state)
    pycomm.master_weights(optimizer)
    assert not dtypes_in(list(optimizer.state.values())) & set(HALF)
    step_on(optimizer, params, range(3, 6), torch.bfloat16)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_torch_distributed_checkpoint(name: str) -> None:
    """It names entries by the model's names, and first takes a step that must change nothing."""
    (model, other), optimizers, handles = trained_and_new(name, torch.bfloat16)
    before = snapshot(handles[0].parameters())
    state = saved(get_optimizer_state_dict(model, optimizers[0]))
    assert "master_weight" in state["state"]["0.weight"]
    set_optimizer_state_dict(other, optimizers[1], state)
    assert_equal(handles[0].parameters(), before)
    assert_equal(handles[1].masters(), handles[0].masters())
    assert [p.dtype for p in other.parameters()] == [p.dtype for p in model.parameters()]
    other.load_state_dict(model.state_dict())
    for optimizer, m in zip(optimizers, (model, other), strict=True):
        step_on(optimizer, list(m.parameters()), range(4, 8), torch.bfloat16)
    assert_equal(handles[0].parameters(), snapshot(handles[1].parameters()))


# Scalers.


def give_scaled(params: Params, step: int, scale: float, infinite: bool = False) -> None:
    """Gradients that float16 holds, times a power of two."""
    give_gradients(params, step, torch.float16)
    for p in params:
        if p.grad is not None:
            p.grad = p.grad * scale
    if infinite:
        params[0].grad = torch.full_like(params[0], torch.inf)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LARS", "Adadelta", "MySGD"])
def test_grad_scaler(name: str) -> None:
    """GradScaler works without unscale_, which refuses float16."""
    params, optimizer, handle = make(name, torch.float16)
    wide, reference, _ = make(name, torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    for step in range(8):
        scaler.scale(torch.ones(()))
        overflows = step == 4
        give_scaled(params, step, scaler.get_scale(), overflows)
        before = snapshot(handle.parameters())
        scaler.step(optimizer)
        if overflows:
            assert_equal(handle.parameters(), before)
        else:
            give_gradients(wide, step, torch.float16)
            reference.step()
        scaler.update()
        assert not hasattr(optimizer, "grad_scale")
    assert scaler.get_scale() != 256.0
    assert_near(handle.parameters(), wide, 1e-6)
    assert_equal(params, [m.half() for m in handle.parameters()])


@pytest.mark.parametrize("name", ["SGD", "LAMB", "Adadelta"])
@pytest.mark.parametrize("clip", [True, False])
def test_loss_scaler(name: str, clip: bool) -> None:
    """Unscale, clip the masters, step: as in float32."""
    params, optimizer, handle = make(name, torch.float16)
    wide, reference, _ = make(name, torch.float32)
    scaler = pycomm.LossScaler(2.0**10)
    for step in range(8):
        overflows = step == 4
        give_scaled(params, step, scaler.get_scale(), overflows)
        give_gradients(wide, step, torch.float16)
        if clip:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(handle.parameters(), 3.0)
            for p in wide:
                p.grad = None if p.grad is None else p.grad.contiguous()
            wanted = nn.utils.clip_grad_norm_(wide, 3.0)
            assert overflows or abs(norm - wanted) <= 1e-6 * wanted
        before = snapshot(handle.parameters())
        scaler.step(optimizer)
        if overflows:
            assert_equal(handle.parameters(), before)
        else:
            reference.step()
        scaler.update()
        assert all(master.grad is None for master in handle.masters())
    assert_near(handle.parameters(), wide, 1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adadelta"])
def test_unscaled_gradients_that_are_given_up(name: str) -> None:
    """Unscaled gradients that zero_grad dropped, or that were replaced, do not come back in a later step."""
    params, optimizer, handle = make(name, torch.float16)
    wide, reference, _ = make(name, torch.float32)
    scaler = pycomm.LossScaler(1024.0)
    for replace in (False, True):
        give_scaled(params, 0, 1024.0)
        scaler.unscale_(optimizer)
        optimizer.zero_grad()
        if replace:
            give_gradients(params, 1, torch.float16)
            give_gradients(wide, 1, torch.float16)
            reference.step()
        optimizer.step()
        scaler.update(1024.0)
    assert_near(handle.parameters(), wide, 1e-6)


@pytest.mark.parametrize("name", ["SGD", "Adadelta"])
def test_clipping_the_models_gradients_is_refused(name: str) -> None:
    """They are scaled, and no longer what counts."""
    params, optimizer, handle = make(name, torch.float16)
    scaler = pycomm.LossScaler(64.0)
    give_scaled(params, 0, 64.0)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(params, 1.0)
    before = snapshot(handle.parameters())
    with pytest.raises(RuntimeError, match="written to after unscale_.*MasterWeights.parameters"):
        scaler.step(optimizer)
    assert_equal(handle.parameters(), before)
