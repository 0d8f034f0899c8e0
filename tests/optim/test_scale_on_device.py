"""Steps of which only the device knows whether they are taken: GradScaler's scale and verdict are read by the kernels.

The CPU stands in for a GPU: its kernels count and skip as a GPU's do.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import pycomm
from pycomm.optim import fused, plans
from pycomm.torch_internals import leave_scale_to_step
from tests.kernels.gpus import requires_cuda
from tests.optim.stepping import Params, assert_equal, assert_near, fresh_gradients, saved, small_parameters

Build = Callable[[Params], torch.optim.Optimizer]

BUILDS: dict[str, Build] = {
    "sgd": lambda params: SGD(params, lr=0.01, momentum=0.9),
    "sgd nesterov maximize": lambda params: SGD(params, lr=0.01, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda params: Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: AdamW(params, lr=0.01),
    "rmsprop": lambda params: RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda params: Adagrad(params, lr=0.01),
    "lars": lambda params: pycomm.LARS(params, 1.0, weight_decay=0.1),
    "lamb": lambda params: pycomm.LAMB(params, 0.01, weight_decay=0.1),
}
OVERFLOWS = {0, 3, 4}
"""Steps whose gradients are not finite; the first makes states, but must not count."""


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host asks what a tensor contains."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the host waits for the device")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("__bool__", "__float__", "__int__", "item", "tolist", "cpu"):
            patch.setattr(torch.Tensor, name, refuse)
        yield


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "on_gpu", lambda tensor: True)


def step_scaled(optimizer: Any, params: Params, step: int, scale: float) -> None:
    """What GradScaler.step does for optimizers that support it."""
    fresh_gradients(params, step)
    for p in params:
        assert p.grad is not None
        p.grad.mul_(scale)
        if step in OVERFLOWS:
            p.grad.fill_(torch.inf)
    optimizer.grad_scale = torch.tensor(scale)
    optimizer.found_inf = torch.tensor(1.0 if step in OVERFLOWS else 0.0)
    optimizer.step()


def train(build: Build, steps: range, dtype: torch.dtype = torch.float32) -> tuple[Params, Any]:
    params = [nn.Parameter(p.detach().to(dtype)) for p in small_parameters()]
    optimizer = build(params)
    pycomm.fuse(optimizer)
    for step in steps:
        step_scaled(optimizer, params, step, 1024.0)
    return params, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BUILDS)
def test_as_if_the_host_knew(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit in float32; in float64 powers of beta may differ in the last."""
    wanted, host = train(BUILDS[name], range(8), dtype)
    on_device(monkeypatch)
    actual, device = train(BUILDS[name], range(8), dtype)
    if dtype == torch.float32:
        assert_equal(actual, wanted)
    else:
        assert_near(actual, wanted, 1e-14)
    for p, q in zip(actual, wanted, strict=True):
        assert device.state[p].get("step") == host.state[q].get("step")
    if "step" in device.state[actual[0]]:
        assert device.state[actual[0]]["step"].item() == 8 - len(OVERFLOWS)


@pytest.mark.parametrize("name", BUILDS)
def test_the_host_does_not_wait(name: str, monkeypatch: pytest.MonkeyPatch, made: list[plans.StepPlan]) -> None:
    on_device(monkeypatch)
    params = small_parameters()
    optimizer = BUILDS[name](params)
    pycomm.fuse(optimizer)
    for step in range(2):
        step_scaled(optimizer, params, step, 1024.0)
    before = len(made)
    with no_waiting():
        for step in range(2, 6):
            step_scaled(optimizer, params, step, 1024.0)
    assert len(made) == before


@pytest.mark.parametrize(
    "build",
    [
        lambda params: SGD(params, lr=0.01, momentum=0.9, dampening=0.5),
        lambda params: Adagrad(params, lr=0.01, lr_decay=0.5),
    ],
    ids=["dampening", "Adagrad's decay"],
)
def test_a_step_that_depends_on_the_last_verdicts_waits(
    build: Callable[[Params], torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the next gradient is the first momentum, or what the rate is."""
    wanted, _ = train(build, range(6))
    on_device(monkeypatch)
    actual, _ = train(build, range(6))
    assert_equal(actual, wanted)


def test_state_goes_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the host's counts and the device's, in the middle of training and by a checkpoint."""
    wanted, _ = train(BUILDS["adam"], range(12))
    params = [nn.Parameter(p.detach().float()) for p in small_parameters()]
    optimizer: Any = BUILDS["adam"](params)
    pycomm.fuse(optimizer)
    for step in range(12):
        with pytest.MonkeyPatch.context() as patch:
            if 3 <= step < 6 or step >= 9:
                on_device(patch)
            step_scaled(optimizer, params, step, 1024.0)
        if step == 7:
            optimizer.load_state_dict(saved(optimizer.state_dict()))
    assert_equal(params, wanted)


def test_with_gradscaler_and_torchs_fused_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """``fused=True`` makes GradScaler leave scale and verdict; the state keeps torch's form."""
    on_device(monkeypatch)

    def run(fuse: bool) -> tuple[Params, Any, float]:
        params = small_parameters()
        optimizer = Adam(params, lr=0.01, fused=True)
        if fuse:
            pycomm.fuse(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(8):
            scaler.scale(torch.ones(()))
            fresh_gradients(params, step)
            for p in params:
                assert p.grad is not None
                p.grad.mul_(scaler.get_scale() if step != 3 else torch.inf)
            scaler.step(optimizer)
            scaler.update()
        return params, optimizer.state_dict()["state"], scaler.get_scale()

    (actual, state, scale), (wanted, torchs_state, torchs_scale) = run(True), run(False)
    assert_near(actual, wanted, 1e-7)  # GradScaler's reciprocals are float32
    assert scale == torchs_scale
    for i, entry in torchs_state.items():
        assert [(k, v.dtype, v.shape) for k, v in state[i].items()] == [(k, v.dtype, v.shape) for k, v in entry.items()]
        assert state[i]["step"] == entry["step"] == 7.0


@requires_cuda
def test_a_gpu_is_not_waited_for() -> None:
    """GradScaler's whole step, with torch on the watch; the same on the CPU, where nothing is left to the device."""

    def run(device: str) -> Params:
        params = [nn.Parameter(p.detach().float().to(device)) for p in small_parameters()]
        optimizer = Adam(params, lr=0.01, fused=True)
        pycomm.fuse(optimizer)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=100)
        scaler.scale(torch.ones((), device=device))  # makes the scale a tensor
        for step in range(8):
            fresh_gradients(params, step)
            for p in params:
                assert p.grad is not None
                p.grad.mul_(1024.0 * 0.5 ** (step > 4) if step != 4 else torch.inf)
            with waits_refused() if device == "cuda" and step > 1 else nullcontext():
                scaler.step(optimizer)
                scaler.update()
        return params

    assert_equal([p.cpu() for p in run("cuda")], run("cpu"))


@contextmanager
def waits_refused() -> Iterator[None]:
    """Make torch raise where the host waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


def test_master_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch)
    for build in (BUILDS["adam"], lambda params: torch.optim.Adagrad(params, lr=0.1)):  # by kernels, and by its own
        params = [nn.Parameter(torch.ones(4, 3, dtype=torch.float16)), nn.Parameter(torch.ones(5))]
        optimizer: Any = build(params)
        handle = pycomm.master_weights(optimizer)
        for step in range(6):
            before = handle.master_of(params[0]).clone()
            step_scaled(optimizer, params, step, 8.0)
            assert torch.equal(handle.master_of(params[0]), before) == (step in OVERFLOWS)
            assert torch.equal(params[0], handle.master_of(params[0]).half())
        assert optimizer.state[params[0]]["step"].item() == 6 - len(OVERFLOWS)


def test_lars_ratio_is_of_unscaled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is no power of two, beside a factor of clipping."""
    on_device(monkeypatch)
    ends = []
    for scale in (1.0, 3.0):
        w = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
        optimizer: Any = pycomm.LARS([w], 2.0, 0.5, 0.5, 0.1)
        handle = pycomm.fuse(optimizer)
        leave_scale_to_step(optimizer)
        w.grad = torch.tensor([[12.0, 16.0]], dtype=torch.float64) * scale
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
        handle.leave_factor(0.5)
        optimizer.step()
        ends.append(w.detach())
    torch.testing.assert_close(ends[0], torch.tensor([[2.4, 3.2]], dtype=torch.float64))
    assert_near(ends[1:], ends[:1], 1e-15)
