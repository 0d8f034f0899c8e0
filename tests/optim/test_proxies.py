"""Proxies of trainers around optimizers: whatever takes an optimizer works on the one inside."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.optim.parameters import checked_optimizer, unwrapped
from tests.on_ranks import on_ranks
from tests.reducer.test_around_torch import proxy_of

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
HAS_LIGHTNING = importlib.util.find_spec("lightning") is not None
PROXIES = [
    "accelerate",
    "fabric",
    pytest.param("Accelerate's own", marks=pytest.mark.skipif(not HAS_ACCELERATE, reason="needs accelerate")),
    pytest.param("Fabric's own", marks=pytest.mark.skipif(not HAS_LIGHTNING, reason="needs lightning")),
    pytest.param("Lightning's own", marks=pytest.mark.skipif(not HAS_LIGHTNING, reason="needs lightning")),
]


def wrapped(optimizer: torch.optim.Optimizer, how: str) -> Any:
    if how == "Accelerate's own":
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare(optimizer)
    if how == "Fabric's own":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
        return fabric.setup_optimizers(optimizer)
    if how == "Lightning's own":
        from lightning.pytorch.core.optimizer import LightningOptimizer

        made: Any = LightningOptimizer(optimizer)
        made._strategy = type("Strategy", (), {"optimizer_step": lambda _, inner, closure, **__: inner.step(closure)})()
        return made
    return proxy_of(optimizer, how)


def optimizer_of(dtype: torch.dtype = torch.float32, kind: Any = torch.optim.AdamW) -> tuple[Any, nn.Linear]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=dtype)
    return kind(model.parameters(), lr=0.1), model


def backward(model: nn.Linear, factor: float = 1.0) -> None:
    model.zero_grad()
    (model(torch.ones(2, 4, dtype=model.weight.dtype)).square().sum() * factor).backward()


def compare(how: str, train: Callable[[Any, nn.Linear], Any], dtype: torch.dtype = torch.float32) -> None:
    """``train`` does the same with a proxy as with the optimizer inside it, to the bit."""
    results = []
    for proxied in (False, True):
        optimizer, model = optimizer_of(dtype)
        train(wrapped(optimizer, how) if proxied else optimizer, model)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("how", PROXIES)
def test_the_one_inside(how: str) -> None:
    optimizer, _ = optimizer_of()
    proxy = wrapped(optimizer, how)
    assert proxy is not optimizer
    assert checked_optimizer(proxy) is unwrapped(proxy) is unwrapped(optimizer) is optimizer


def test_a_proxy_that_is_no_optimizer() -> None:
    """As apex's: it has the state of the one inside."""

    class Proxy:
        state = property(lambda self: self.optimizer.state)
        param_groups = property(lambda self: self.optimizer.param_groups)

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    optimizer, module = optimizer_of()
    given: Any = module
    assert checked_optimizer(Proxy(optimizer)) is optimizer
    assert pycomm.fuse(Proxy(optimizer)).optimizer is optimizer  # type: ignore[arg-type]
    given.optimizer = optimizer  # which does not make the module one
    for take in (pycomm.fuse, pycomm.master_weights):
        with pytest.raises(TypeError, match=r"optimizer is a [\w.]*Linear, wanted"):
            take(given)


@pytest.mark.parametrize("how", PROXIES)
def test_fuse(how: str) -> None:
    optimizer, _ = optimizer_of()
    handle = pycomm.fuse(wrapped(optimizer, how))
    assert handle.optimizer is optimizer
    with pytest.raises(RuntimeError, match="replaced"):
        pycomm.fuse(optimizer)
    handle.detach()

    def train(given: Any, model: nn.Linear) -> None:
        pycomm.fuse(given)
        for _ in range(3):
            backward(model)
            given.step()

    compare(how, train)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", PROXIES)
def test_master_weights(how: str, dtype: torch.dtype) -> None:
    optimizer, model = optimizer_of(dtype)
    proxy = wrapped(optimizer, how)
    masters = pycomm.master_weights(proxy)
    assert masters.optimizer is optimizer
    assert all(p.dtype == torch.float32 for p in masters.parameters())
    backward(model)
    proxy.step()
    assert "master_weight" in optimizer.state_dict()["state"][0]

    def train(given: Any, model: nn.Linear) -> None:
        masters = pycomm.master_weights(given)
        scaler = pycomm.LossScaler(8.0)
        for step in range(4):
            backward(model, scaler.get_scale())
            if step % 2:
                scaler.unscale_(given)
                assert scaler.is_unscaled(given)
                nn.utils.clip_grad_norm_(masters.parameters(), 0.5)
            scaler.step(given)
            scaler.update()

    compare(how, train, dtype)


@pytest.mark.parametrize("how", PROXIES)
def test_loss_scalers_take_either(how: str) -> None:
    """What was unscaled by the one is not unscaled again by the other."""

    def train(given: Any, model: nn.Linear) -> None:
        scaler, inner = pycomm.LossScaler(8.0), unwrapped(given)
        for unscaled, stepped in ((given, inner), (inner, given), (given, given), (None, given)):
            backward(model, scaler.get_scale())
            if unscaled is not None:
                scaler.unscale_(unscaled)
                assert scaler.is_unscaled(stepped)
                with pytest.raises(RuntimeError, match="already been called"):
                    scaler.unscale_(stepped)
            scaler.step(stepped)
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.step(given)
            scaler.update()

    compare(how, train)


@pytest.mark.parametrize("how", PROXIES)
def test_schedules(how: str) -> None:
    def train(given: Any, model: nn.Linear) -> None:
        scheduler = pycomm.optim.WarmupLR(given, 2, start_factor=0.1)
        for _ in range(4):
            backward(model)
            given.step()
            scheduler.step()
        saved = scheduler.state_dict()
        pycomm.optim.WarmupLR(given, 2, start_factor=0.1, last_epoch=3).load_state_dict(saved)

    compare(how, train)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("how", PROXIES)
def test_what_averages(how: str) -> None:
    """With one rank: what is meant is the optimizer inside."""
    for begin in (
        lambda given, model: pycomm.attach(given, model),
        lambda given, model: pycomm.local_sgd(given, model, every=2),
        lambda given, model: pycomm.local_sgd(given, model, every=2, outer=pycomm.Elastic()),
        lambda given, model: pycomm.gossip(given, model),
    ):

        def train(given: Any, model: nn.Linear, begin: Any = begin) -> None:
            handle = begin(given, model)
            for _ in range(4):
                backward(model)
                given.step()
            handle.detach()

        compare(how, train)


class Counted:
    """What is monitored: one more step each time that somebody asks."""

    steps = 0

    def stats(self) -> dict[str, Any]:
        self.steps += 1
        return {"steps": self.steps}


@pytest.mark.parametrize("how", PROXIES)
def test_monitor(how: str) -> None:
    optimizer, model = optimizer_of()
    proxy = wrapped(optimizer, how)
    rows: list[Any] = []
    monitor = pycomm.monitor(Counted(), 1, rows.append, optimizer=proxy)
    for _ in range(2):
        backward(model)
        proxy.step()
    assert len(rows) == 2
    monitor.close()


@pytest.mark.parametrize(
    "take",
    [
        pycomm.master_weights,
        lambda given: pycomm.optim.WarmupLR(given, 2),
    ],
)
@pytest.mark.parametrize("given", [None, "adam", torch.optim.SGD, nn.Linear(2, 2)])
def test_what_is_no_optimizer(take: Any, given: Any) -> None:
    with pytest.raises(TypeError, match=r"optimizer is a \w+, wanted a torch.optim.Optimizer"):
        take(given)


@on_ranks(2)
def test_no_optimizer_on_one_rank() -> None:
    """An error on every rank, and the next call works."""
    optimizer, model = optimizer_of()
    given: Any = nn.Linear(2, 2) if dist.get_rank() == 1 else optimizer
    with pytest.raises((TypeError, ValueError), match="optimizer is a Linear, wanted a torch.optim.Optimizer"):
        pycomm.attach(given, model)
    pycomm.attach(proxy_of(optimizer, "accelerate"), model).detach()
