"""attach beside what scripts use of torch: averaged weights, parametrizations, synchronized statistics, GANs."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import swa_utils

import pycomm
from pycomm.training.reducer.engine import Engine
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached
from tests.reducer.models import average_gradients, batch_of, loss_of, losses_at, make_model, sgd

STEPS = 6


def train(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], None], alone: bool) -> None:
    """Train for some steps; ``alone``: by the mean of all ranks' gradients, computed here."""
    for step in range(STEPS):
        optimizer.zero_grad()
        if alone:
            means = average_gradients(model, losses_at(step))
            for name, param in model.named_parameters():
                param.grad = means[name]
        else:
            loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        after()


def assert_close(a: nn.Module, b: nn.Module) -> None:
    mine, theirs = a.state_dict(), b.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-12, atol=1e-12)


# Averaged weights


@pytest.mark.parametrize("kind", ["EMA", "SWA"])
@on_ranks(2)
def test_averaged_models(kind: str) -> None:
    """EMA and SWA, with its learning rate: on every rank what one process gets, and saved as usual."""

    def run(alone: bool) -> Any:
        model = make_model()
        optimizer = sgd(model)
        average = swa_utils.get_ema_multi_avg_fn(0.9) if kind == "EMA" else None
        averaged = swa_utils.AveragedModel(model, multi_avg_fn=average)
        scheduler = swa_utils.SWALR(optimizer, swa_lr=0.03, anneal_epochs=3)

        def after() -> None:
            averaged.update_parameters(model)
            scheduler.step()

        if alone:
            train(model, optimizer, after, alone=True)
        else:
            with attached(optimizer, model):
                train(model, optimizer, after, alone=False)
        return averaged

    ours = run(alone=False)
    assert_replicas_equal(ours)
    assert_close(ours, run(alone=True))
    assert int(ours.n_averaged) == STEPS
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    copy = swa_utils.AveragedModel(make_model(seed=1))
    copy.load_state_dict(torch.load(file, weights_only=True))
    assert_close(copy, ours)


@on_ranks(2)
def test_statistics_of_averaged_models() -> None:
    """``update_bn`` on the same data leaves the same statistics on all ranks."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    optimizer = sgd(model)
    averaged: Any = swa_utils.AveragedModel(model)
    with attached(optimizer, model, buffers="average"):
        train(model, optimizer, lambda: averaged.update_parameters(model), alone=False)
    swa_utils.update_bn([batch_of(0, step)[0] for step in range(3)], averaged)
    mean: Any = averaged.module[1].running_mean
    everyone = [torch.empty_like(mean) for _ in range(2)]
    dist.all_gather(everyone, mean)
    assert torch.equal(*everyone)
    assert mean.any()


# Parametrizations


@pytest.mark.parametrize("compression", [None, pycomm.TopK(1.0)], ids=repr)
@pytest.mark.parametrize("kind", ["weight_norm", "orthogonal", "spectral_norm"])
@on_ranks(2)
def test_parametrizations(kind: str, compression: Any) -> None:
    """The parameters behind a parametrization are averaged, by their own names."""

    def parametrized() -> Any:
        model = make_model()
        torch.manual_seed(0)
        getattr(parametrizations, kind)(model[0])
        return model

    ours, alone = parametrized(), parametrized()
    if kind == "spectral_norm":  # its power iteration runs in every forward, of which `alone` has one for each rank
        ours[0].parametrizations.weight[0].eval()
        alone[0].parametrizations.weight[0].eval()
    optimizer = sgd(ours)
    with attached(optimizer, ours, compression=compression) as reducer:
        assert any("parametrizations.weight.original" in name for name in reducer.named_parameters())
        train(ours, optimizer, lambda: None, alone=False)
        assert_replicas_equal(ours)
    train(alone, sgd(alone), lambda: None, alone=True)
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


# Synchronized statistics


@on_ranks(2)
def test_sync_batch_norm() -> None:
    """On CPUs it is torch that refuses, and a forward that raises leaves the ranks together."""
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(12, 5), nn.BatchNorm1d(5)).double())
    with attached(sgd(model), model):
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
            loss_of(model, dist.get_rank(), 0)
        model.eval()
        loss_of(model, dist.get_rank(), 0).backward()
        weight = model[0].weight.grad
        everyone = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(everyone, weight)
        assert torch.equal(*everyone)


# Two models that train each other


def gan(alone: bool, method: Any) -> list[torch.Tensor]:
    """Return the parameters of a generator and of a discriminator after some steps."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(12, 12).double(), nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01, betas=(0.5, 0.9)) for part in (maker, judge)]

    def judged(rank: int, step: int) -> torch.Tensor:
        noise, real = batch_of(rank, step)[0], batch_of(rank + 2, step)[0]
        return (judge(maker(noise).detach()) ** 2).mean() + ((judge(real) - 1) ** 2).mean()

    def fooled(rank: int, step: int) -> torch.Tensor:
        return ((judge(maker(batch_of(rank, step)[0])) - 1) ** 2).mean()

    def gradients(loss: Callable[[int, int], torch.Tensor], part: nn.Module, step: int) -> None:
        """Leave the mean over the ranks of the gradients of ``part`` in it."""
        params = list(part.parameters())
        each = [torch.autograd.grad(loss(rank, step), params) for rank in range(dist.get_world_size())]
        for param, grads in zip(params, zip(*each, strict=True), strict=True):
            param.grad = sum(grads[1:], grads[0]) / len(grads)

    reducers = []
    if not alone:
        for optimizer, part in zip(optimizers, (maker, judge), strict=True):
            reducers.append(pycomm.attach(optimizer, part, compression=method, tuning=pycomm.Tuning(timeout=30)))
    for step in range(STEPS):
        for optimizer, part, loss in ((optimizers[1], judge, judged), (optimizers[0], maker, fooled)):
            optimizer.zero_grad()
            if alone:
                gradients(loss, part, step)
            elif part is judge:
                loss(dist.get_rank(), step).backward()
            else:
                with reducers[1].paused():
                    loss(dist.get_rank(), step).backward()
            optimizer.step()
    for reducer in reducers:
        reducer.detach()
    return [p.detach() for part in (maker, judge) for p in part.parameters()]


@pytest.mark.parametrize("method", [None, pycomm.TopK(1.0)], ids=repr)
@on_ranks(2)
def test_two_models_that_train_each_other(method: Any) -> None:
    for mine, theirs in zip(gan(False, method), gan(True, None), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


# Checkpoints of torch.distributed


@on_ranks(2)
def test_averaged_weights_in_a_distributed_checkpoint(tmp_path: Any) -> None:
    """Model, optimizer, averaged weights and the Reducer, in one checkpoint; training goes on to the bit."""

    def make() -> dict[str, Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        averaged = swa_utils.AveragedModel(model)
        reducer = pycomm.attach(optimizer, model, compression=pycomm.TopK(0.1), tuning=pycomm.Tuning(timeout=30))
        return {"model": model, "optimizer": optimizer, "averaged": averaged, "reducer": reducer}

    def run(parts: dict[str, Any]) -> None:
        train(parts["model"], parts["optimizer"], lambda: parts["averaged"].update_parameters(parts["model"]), False)

    dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # whose stubs export nothing
    first = make()
    run(first)
    dcp.save({name: part.state_dict() for name, part in first.items()}, checkpoint_id=str(tmp_path))
    run(first)
    second = make()
    run(second)  # so that the optimizer has state to load into
    state = {name: part.state_dict() for name, part in second.items()}
    dcp.load(state, checkpoint_id=str(tmp_path))
    for name, part in second.items():
        part.load_state_dict(state[name])
    run(second)
    for name in ("model", "averaged"):
        for mine, theirs in zip(first[name].parameters(), second[name].parameters(), strict=True):
            assert torch.equal(mine, theirs)
    for parts in (first, second):
        parts["reducer"].detach()


# Compiled models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(12, width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Blocks(nn.Module):
    """Three blocks; ``events`` gets "block" when the gradient of the first one's output is there."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.events = events
        self.first, self.second, self.third = Block(12), Block(12), Block(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        out.register_hook(lambda grad: self.events.append("block"))
        last: torch.Tensor = self.third(self.second(out))
        return last


@on_ranks(2, timeout=110, fresh=True)  # where something was compiled, steps over several hosts wait
def test_compiled_blocks_keep_the_overlap() -> None:
    """Blocks that are compiled one by one send while the backward of those below has yet to run."""
    events: list[str] = []
    model, plain = Blocks(events), Blocks([])
    for block in (model.first, model.second, model.third):
        block.compile(backend="aot_eager", fullgraph=True)
    optimizer = sgd(model)
    original = Engine.launch

    def launch(*args: Any) -> None:
        events.append("launch")
        original(*args)

    with patch.object(Engine, "launch", launch):
        with attached(optimizer, model, bucket_mb=1e-5) as reducer:
            buckets = reducer.stats()["num_buckets"]
            for step in range(3):
                optimizer.zero_grad()
                plain.load_state_dict(model.state_dict())
                events.clear()
                loss_of(model, dist.get_rank(), step).backward()
                for name, grad in average_gradients(plain, losses_at(step)).items():
                    torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-9, atol=1e-9)
                optimizer.step()
    assert events.count("launch") == buckets == 6
    assert events.index("block") >= 3, events
