"""What ranks do differently before a step that they share out: after it, equal replicas would hide it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, make_equal
from tests.reducer.partition.stepping import Weights, backward, gradients_of, rank
from tests.reducer.partition.whole_optimizers import Orthogonal

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {"kernels": lambda params: torch.optim.AdamW(params, lr=0.01), "whole": Orthogonal}
LAST = 2
"""First step in which ranks differ."""

by_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
on_one_or_two_hosts = pytest.mark.parametrize("hosts", ["aa", "ab"])


@contextlib.contextmanager
def trained(name: str, hosts: str, **options: Any) -> Iterator[tuple[Any, torch.optim.Optimizer, Weights]]:
    """Yield a Reducer, its optimizer and model after so many steps, with the gradients of the next one."""
    with on_hosts(hosts):
        model = Weights()
        optimizer = OPTIMIZERS[name](model.parameters())
        with attached(optimizer, model, **options) as reducer:
            for step in range(LAST):
                begin_step(optimizer, model, step)
                optimizer.step()
            begin_step(optimizer, model, LAST)
            yield reducer, optimizer, model


def begin_step(optimizer: torch.optim.Optimizer, model: Weights, step: int) -> None:
    optimizer.zero_grad()
    backward(model.parameters(), gradients_of(rank(), step))


def refused_then_taken(optimizer: torch.optim.Optimizer, model: Weights, match: str) -> None:
    """Check that the step is an error of all ranks, and that the next one works."""
    with pytest.raises((ValueError, RuntimeError), match=match):
        optimizer.step()
    begin_step(optimizer, model, LAST + 1)
    optimizer.step()
    assert_replicas_equal(model)


@by_optimizer
@on_one_or_two_hosts
@on_ranks(2)
def test_whole_gradients_that_one_rank_changes(name: str, hosts: str) -> None:
    with trained(name, hosts, shard="optimizer", independent=True, grads="full") as (_, optimizer, model):
        if rank() == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        refused_then_taken(optimizer, model, "gradient after backward.. 0 is .*reducer.clip_grad_norm")
    with trained(name, hosts, shard="optimizer", independent=True, grads="full") as (reducer, optimizer, model):
        if rank() == 1:
            reducer.clip_grad_norm(0.1)
        refused_then_taken(optimizer, model, "factor of the gradients .* is '1.0' on rank|is '0.* on rank 1")
    with trained(name, hosts, shard="optimizer", independent=True, grads="full") as (_, optimizer, model):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # on all ranks alike
        optimizer.step()


@by_optimizer
@pytest.mark.parametrize("grads", ["part", "full"])
@on_ranks(2)
def test_gradients_that_one_rank_removes(name: str, grads: str) -> None:
    with trained(name, "aa", shard="optimizer", independent=True, grads=grads) as (_, optimizer, model):
        if rank() == 0:
            model.weights[0].grad = None
        refused_then_taken(optimizer, model, "'weights.0: None' on rank 0|weights.0: .*on rank 1.*None' on rank 0")
        begin_step(optimizer, model, LAST + 2)
        model.weights[0].grad, before = None, model.weights[0].detach().clone()
        optimizer.step()
        assert torch.equal(model.weights[0], before), "on all ranks it leaves the parameter out"


SCALERS: dict[str, Callable[[], Any]] = {
    "LossScaler": lambda: pycomm.LossScaler(8.0),
    "LossScaler that does nothing": lambda: pycomm.LossScaler(enabled=False),
    "GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=8.0),
    "GradScaler that does nothing": lambda: torch.amp.GradScaler("cpu", enabled=False),
}


@by_optimizer
@pytest.mark.parametrize("make", SCALERS)
@on_ranks(2)
def test_parts_clipped_by_torch_beside_a_scaler(name: str, make: str) -> None:
    model, scaler = Weights(), SCALERS[make]()
    optimizer = OPTIMIZERS[name](model.parameters())
    with attached(optimizer, model, shard="optimizer", independent=True, loss_scaler=scaler):
        for step in range(2):
            optimizer.zero_grad()
            backward(model.parameters(), gradients_of(rank(), step), scaler.get_scale())
            scaler.unscale_(optimizer)
            if step == 1:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with pytest.raises(ValueError, match=r"written to after backward\(\).*clip by reducer"):
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
                scaler.update()


@by_optimizer
@on_ranks(2)
def test_masters_gradients_clipped_by_torch(name: str) -> None:
    model, scaler = Weights(torch.bfloat16), pycomm.LossScaler(8.0)
    optimizer = OPTIMIZERS[name](model.parameters())
    masters = pycomm.master_weights(optimizer)
    with attached(optimizer, model, shard="optimizer", independent=True, loss_scaler=scaler):
        backward(model.parameters(), gradients_of(rank(), 0, torch.bfloat16), scaler.get_scale())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(masters.parameters(), 0.1)
        with pytest.raises(ValueError, match=r"MasterWeights.parameters\(\) was written to"):
            scaler.step(optimizer)


@on_ranks(3)
def test_masters_of_own_parameters_have_one_norm() -> None:
    model, scaler = Weights(torch.bfloat16), pycomm.LossScaler(8.0)
    optimizer = Orthogonal(model.parameters())
    pycomm.master_weights(optimizer)
    with attached(optimizer, model, shard="optimizer", independent=True, grads="full", loss_scaler=scaler) as reducer:
        for step in range(LAST + 1):
            optimizer.zero_grad()
            backward(model.parameters(), gradients_of(rank(), step, torch.bfloat16), scaler.get_scale())
            wanted = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm() / 8
            scaler.unscale_(optimizer)
            torch.testing.assert_close(reducer.clip_grad_norm(0.1), wanted)
            scaler.step(optimizer)  # a factor that differs between ranks is an error
            scaler.update()


@by_optimizer
@on_one_or_two_hosts
@on_ranks(2)
def test_state_that_is_loaded_otherwise_on_one_rank(name: str, hosts: str) -> None:
    with trained(name, hosts, shard="optimizer", independent=True) as (_, optimizer, model):
        saved = copy.deepcopy(optimizer.state_dict())
        if rank() == 1:
            optimizer.load_state_dict(copy.deepcopy(saved))  # steps write to what was loaded
        with pytest.raises(ValueError, match="of parameter 0 is '[0-9]*' on rank 1, 'nothing' on rank 0"):
            optimizer.step()
        if rank() == 0:
            optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.step()
        other = copy.deepcopy(saved)
        for value in (value for value in other["state"][0].values() if isinstance(value, torch.Tensor)):
            value.add_(rank())
        optimizer.load_state_dict(other)
        begin_step(optimizer, model, LAST + 1)
        with pytest.raises(ValueError, match="state loaded since the last step, of parameter 0"):
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.step()
        assert_replicas_equal(model)


@by_optimizer
@on_one_or_two_hosts
@on_ranks(2)
def test_parameters_that_one_rank_writes(name: str, hosts: str) -> None:
    with trained(name, hosts, shard="optimizer", independent=True) as (_, optimizer, model):
        with torch.no_grad():
            model.weights[0].mul_(0.5)  # on all ranks alike
        optimizer.step()
        begin_step(optimizer, model, LAST + 1)
        if rank() == 1:
            with torch.no_grad():
                model.weights[0].mul_(0.5)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"parameter 'weights\.0' differs"):
                optimizer.step()
        make_equal(model)
        optimizer.step()
        assert_replicas_equal(model)


@by_optimizer
@on_ranks(2)
def test_another_optimizer_that_would_step_parts(name: str) -> None:
    model = Weights()
    optimizer = OPTIMIZERS[name](model.parameters())
    with attached(optimizer, model, shard="optimizer", independent=True):
        for step in range(LAST):
            begin_step(optimizer, model, step)
            optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        begin_step(optimizer, model, LAST)
        with pytest.raises(RuntimeError, match="a SGD is about to step 'weights"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(map(torch.equal, before, model.parameters()))


@by_optimizer
@on_ranks(2)
def test_a_rank_that_stays_absent(name: str) -> None:
    with trained(name, "aa", shard="optimizer", independent=True) as (reducer, optimizer, model):
        optimizer.step()
        match = r"stay_absent\(\) cannot be combined with shard=Sharding\('optimizer', independent=True\)"
        if rank() == 1:
            with pytest.raises(ValueError, match=match):
                reducer.stay_absent()
        else:
            with pytest.raises((RuntimeError, ValueError), match=match):
                begin_step(optimizer, model, LAST + 1)


class Rounded(Orthogonal):
    """Steps otherwise than its base, with the same options."""


@pytest.mark.parametrize("shard", [None, pycomm.Sharding("optimizer", independent=True)], ids=["whole", "shared"])
@on_ranks(2)
def test_another_class_on_one_rank(shard: pycomm.Sharding | None) -> None:
    model = Weights()
    optimizer = (Rounded if rank() == 1 else Orthogonal)(model.parameters())
    with pytest.raises(ValueError, match="optimizer 0 is 'Rounded' on rank 1, 'Orthogonal' on rank 0"):
        pycomm.attach(optimizer, model, shard=shard)
    for average in (
        lambda: pycomm.local_sgd(optimizer, model, every=2),
        lambda: pycomm.gossip(optimizer, model),
    ):
        with pytest.raises(ValueError, match="Rounded"):
            average()
