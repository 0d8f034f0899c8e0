"""Steps that ranks take together have the bits of those that each takes by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached
from tests.reducer.partition.stepping import (
    OPTIMIZERS,
    SHARDS,
    Weights,
    assert_same,
    backward,
    gradients_of,
    in_memory_order,
    own_span,
    rank,
    values_of,
)

Body = Callable[[pycomm.Reducer, torch.optim.Optimizer, Weights], None]


def trained(
    make: Callable[[Any], torch.optim.Optimizer], body: Body, dtype: Any = torch.float32, **options: Any
) -> Any:
    """Return what ``body`` leaves, run with a new model and optimizer that are attached with ``options``."""
    model = Weights(dtype)
    optimizer = make(model.parameters())
    if dtype is torch.float32 and "shard" not in options:
        pycomm.fuse(optimizer)
    elif dtype is not torch.float32:
        pycomm.master_weights(optimizer)
    with attached(optimizer, model, bucket_mb=0.005, **options) as reducer:
        body(reducer, optimizer, model)
        found = values_of(optimizer)
        assert_replicas_equal(model)
    return found


def few_steps(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
    for step in range(4):
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(rank(), step))
        optimizer.step()


def clipped_steps(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
    for step in range(4):
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(rank(), step))
        if step != 1:
            reducer.clip_grad_norm(3.0)
        optimizer.step()


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(3)
def test_every_rule_has_the_bits_of_a_step_alone(name: str, shard: str) -> None:
    wanted = trained(OPTIMIZERS[name], few_steps)
    assert_same(trained(OPTIMIZERS[name], few_steps, **SHARDS[shard]), wanted)


@pytest.mark.parametrize("shard", SHARDS)
@on_ranks(1, 4)
def test_clipping_by_the_global_norm(shard: str) -> None:
    assert_same(trained(OPTIMIZERS["Adam"], clipped_steps, **SHARDS[shard]), trained(OPTIMIZERS["Adam"], clipped_steps))


def windows(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for number in range(2):
            reducer.set_weight(1.0 + rank())
            backward(model.parameters(), gradients_of(rank(), 2 * step + number))
        optimizer.step()


def schedules(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    few_steps(reducer, optimizer, model)
    schedule.step()
    optimizer.param_groups[0]["weight_decay"] = 0.25
    few_steps(reducer, optimizer, model)


def missing_gradients(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
    params = list(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        some = params[step % 2 :: 2] if step else params[rank() :: dist.get_world_size()]
        places = [next(i for i, p in enumerate(params) if p is q) for q in some]
        backward(some, [gradients_of(rank(), step)[i] for i in places])
        optimizer.step()


def new_parameters(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
    few_steps(reducer, optimizer, model)
    late = torch.nn.Parameter(torch.full((70, 3), 0.5))
    model.register_parameter("late", late)
    optimizer.add_param_group({"params": [late], "lr": 0.05})
    for step in range(3):
        optimizer.zero_grad()
        model()  # where new parameters are noticed
        grads = [*gradients_of(rank(), step), torch.full((70, 3), 1.0 + rank())]
        backward([*model.weights, late], grads)
        optimizer.step()


def kept_gradients(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
    """Keep gradients, so that the next ones come into new memory."""
    kept = []
    for step in range(4):
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(rank(), step))
        kept.append([p.grad[..., :1] if p.dim() else p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("body", [windows, schedules, missing_gradients, new_parameters, kept_gradients])
@on_ranks(2)
def test_all_that_training_does(body: Body, shard: str) -> None:
    options: dict[str, Any] = {"accumulate": 2} if body is windows else {}
    wanted = trained(OPTIMIZERS["Adam"], body, **options)
    assert_same(trained(OPTIMIZERS["Adam"], body, **options, **SHARDS[shard]), wanted)


@pytest.mark.parametrize("shard", SHARDS)
@on_ranks(3)
def test_sums_instead_of_averages(shard: str) -> None:
    wanted = trained(OPTIMIZERS["SGD"], few_steps, average=False)
    assert_same(trained(OPTIMIZERS["SGD"], few_steps, average=False, **SHARDS[shard]), wanted)


@pytest.mark.parametrize("method", [pycomm.FP16(), pycomm.BF16()])
@pytest.mark.parametrize("shard", SHARDS)
@on_ranks(2)
def test_gradients_that_travel_in_half_precision(shard: str, method: Any) -> None:
    wanted = trained(OPTIMIZERS["Adam"], few_steps, compression=method)
    assert_same(trained(OPTIMIZERS["Adam"], few_steps, compression=method, **SHARDS[shard]), wanted)


def half_steps(dtype: torch.dtype, bound: float, skipped: int = 1) -> Body:
    """Return steps of which one is not finite; ``skipped``: how many the scaler has skipped after that."""

    def run(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
        scaler = reducer._settings.loss_scaler
        for step in range(5):
            optimizer.zero_grad()
            grads = gradients_of(rank(), step, dtype)
            if step == 2 and rank() == 1:
                grads[6][0, 0] = torch.inf  # in the part of one rank only
            scaler.scale(
                torch.stack([(p * g).sum().float() for p, g in zip(model.parameters(), grads, strict=True)]).sum()
            ).backward()
            scaler.unscale_(optimizer)
            if bound:
                reducer.clip_grad_norm(bound)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skipped_steps == skipped

    return run


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize(("name", "dtype"), [("Adam", torch.float16), ("LARS", torch.bfloat16)])
@on_ranks(2)
def test_masters_and_a_loss_scaler(name: str, dtype: torch.dtype, shard: str) -> None:
    found = [
        trained(OPTIMIZERS[name], half_steps(dtype, 5.0), dtype, loss_scaler=pycomm.LossScaler(2.0**4), **options)
        for options in ({}, SHARDS[shard])
    ]
    assert_same(found[1], found[0])


def grad_scaler_steps(reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer, model: Weights) -> None:
    scaler = reducer._settings.loss_scaler
    for step in range(5):
        optimizer.zero_grad()
        grads = gradients_of(rank(), step)
        if step == 2 and rank() == 1:
            grads[6][-1, -1] = torch.nan
        products = [(p * g).sum() for p, g in zip(model.parameters(), grads, strict=True)]
        scaler.scale(torch.stack(products).sum()).backward()
        if step == 2:
            assert reducer.name_of_not_finite() == "parameter 'weights.6'"
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**7


@pytest.mark.parametrize("shard", SHARDS)
@on_ranks(2)
def test_torchs_grad_scaler_skips_on_all_ranks(shard: str) -> None:
    found = [
        trained(
            OPTIMIZERS["Adam"],
            grad_scaler_steps,
            loss_scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8),
            **options,
        )
        for options in ({}, SHARDS[shard])
    ]
    assert_same(found[1], found[0])


@pytest.mark.parametrize("shard", SHARDS)
@on_ranks(3)
def test_gradients_after_backward(shard: str) -> None:
    model, options = Weights(), SHARDS[shard]
    optimizer = torch.optim.Adam(model.parameters())
    with attached(optimizer, model, **options) as reducer:
        for step in range(2):
            optimizer.zero_grad()
            backward(model.parameters(), gradients_of(rank(), step))
            everyone = [gradients_of(r, step) for r in range(dist.get_world_size())]
            for p, *of in zip(model.parameters(), *everyone, strict=True):
                total = torch.stack(of).sum(0) * (1.0 / len(of))
                mean, mine = (
                    in_memory_order(t.contiguous() if t.dim() != 4 else t.to(memory_format=torch.channels_last))
                    for t in (total, of[rank()])
                )
                span = own_span(p, reducer)
                assert p.grad is not None
                got = in_memory_order(p.grad)
                full = options.get("grads", "part")
                if full == "full":
                    assert torch.equal(got, mean)
                elif full == "local":
                    assert torch.equal(got, mine)
                else:
                    assert torch.equal(got[span], mean[span])
            optimizer.step()
        owned = [own_span(p, reducer) for p in model.parameters()]
        assert sum(span.stop - span.start for span in owned) < sum(p.numel() for p in model.parameters())
