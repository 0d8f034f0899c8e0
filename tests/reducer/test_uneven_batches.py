"""Ranks without a batch: every way that the documentation names, on the rank that has none, alone, in every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, over_tcp
from tests.reducer.models import close, loss_of, losses_at, make_model, sgd

WAYS = ["set_weight(0), flush()", "flush()", "skip_batch()", "set_weight(0), a loss of zero"]


def without_batch(model: Any, reducer: Any, way: str) -> None:
    if "set_weight" in way:
        reducer.set_weight(0)
    if "flush" in way:
        reducer.flush()
    elif "skip" in way:
        reducer.skip_batch()
    else:
        (loss_of(model, 0, 0) * float("nan")).backward()


@pytest.mark.behavior(
    "Passes and steps",
    "call `flush()` on a rank that has fewer batches",
    "It counts as zeros; after `set_weight(0)`, not at all.",
)
@pytest.mark.pairwise
@pytest.mark.parametrize("over_hosts", [False, True])
@pytest.mark.parametrize("zero_grad", ["optimizer", "model", "in place"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_one_rank_has_fewer_batches(way: str, zero_grad: str, over_hosts: bool) -> None:
    rank, model, plain = dist.get_rank(), make_model(), make_model()
    optimizer = sgd(model)
    with over_tcp(over_hosts), attached(optimizer, model) as reducer:
        for step in range(6):
            plain.load_state_dict(model.state_dict())
            there = losses_at(step)[: 2 if step in (0, 1, 3) else 1]
            grads = [torch.autograd.grad(loss(plain), list(plain.parameters())) for loss in there]
            divisor = 2 if way == "flush()" else len(there)  # who flushes counts as zeros
            if zero_grad == "model":
                model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=zero_grad == "optimizer")
            if rank < len(there):
                if "set_weight" in way:
                    reducer.set_weight(8)
                loss_of(model, rank, step).backward()
            else:
                without_batch(model, reducer, way)
            for i, param in enumerate(model.parameters()):
                close(param.grad, torch.stack([grad[i] for grad in grads]).sum(0) / divisor, 1e-9)
            optimizer.step()
        assert reducer.stats()["steps"] == 6
        assert_replicas_equal(model)


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("own", [True, False])
@on_ranks(2)
def test_beside_a_scaler_that_leaves_out_steps(own: bool, way: str) -> None:
    """A step that a scaler leaves out calls no hook of the optimizer."""
    rank, model = dist.get_rank(), make_model(dtype=torch.float32)
    optimizer = sgd(model)
    scaler: Any = pycomm.LossScaler(2.0**10) if own else torch.amp.GradScaler("cpu", 2.0**10)
    with attached(optimizer, model, loss_scaler=scaler) as reducer:
        for step in range(6):
            optimizer.zero_grad()
            if rank == 0 or step < 3:
                if "set_weight" in way:
                    reducer.set_weight(8)
                loss = loss_of(model, rank, step)
                scaler.scale(loss * (float("inf") if step in (1, 4) else 1.0)).backward()
            else:
                without_batch(model, reducer, way)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**8
        assert_replicas_equal(model)


@pytest.mark.parametrize("weights", [False, True])
@on_ranks(2)
def test_all_ranks_flush_in_every_step(weights: bool) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        for step in range(5):
            optimizer.zero_grad()
            if rank == 0 or step < 3:
                if weights:
                    reducer.set_weight(8)
                loss_of(model, rank, step).backward()
            reducer.flush()
            reducer.flush()
            optimizer.step()
        assert reducer.stats()["steps"] == 5
        assert_replicas_equal(model)


@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.5)], ids=repr)
@on_ranks(2)
def test_a_flush_of_nothing_does_nothing(compression: Any) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, accumulate=2, compression=compression) as reducer:
        for step in range(3):
            for i in range(2):
                loss_of(model, rank, 2 * step + i).backward()
            optimizer.step()
            optimizer.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        reducer.flush()
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("weights", [False, True])
@on_ranks(2)
def test_windows_of_different_lengths(weights: bool) -> None:
    rank, model, plain = dist.get_rank(), make_model(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, accumulate=3) as reducer:
        for step in range(4):
            plain.load_state_dict(model.state_dict())
            counts = [3, (step * 2) % 4]  # 0, 2, 0, 2
            total = [torch.zeros_like(p) for p in plain.parameters()]
            for r in (0, 1):
                for i in range(counts[r]):
                    for into, grad in zip(
                        total,
                        torch.autograd.grad(loss_of(plain, r, 3 * step + i), list(plain.parameters())),
                        strict=True,
                    ):
                        into += grad / (sum(counts) if weights else 2)
            optimizer.zero_grad()
            for i in range(counts[rank]):
                if weights:
                    reducer.set_weight(4)
                loss_of(model, rank, 3 * step + i).backward()
            if weights and counts[rank] == 0:
                reducer.set_weight(0)
            if counts[rank] < 3:
                reducer.flush()
            for param, wanted in zip(model.parameters(), total, strict=True):
                close(param.grad, wanted, 1e-9)
            optimizer.step()
        assert_replicas_equal(model)
