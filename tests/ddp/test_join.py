"""Ranks with fewer batches, under DistributedDataParallel's join()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.ddp.wrapping import OutOfOrder, residuals_of, wrapped
from tests.on_ranks import on_ranks
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model


def uneven(model: Any, handle: Any, counts: list[int], **options: Any) -> list[dict[str, torch.Tensor]]:
    """The gradients of this rank's steps, of which rank r has ``counts[r]``."""
    rank, gradients = dist.get_rank(), []
    with model.join(**options):
        for number in range(counts[rank]):
            model.zero_grad()
            loss_of(model, rank, number).backward()
            gradients.append({name: p.grad.clone() for name, p in model.module.named_parameters()})
    assert handle.stats()["steps"] == max(counts), "those that have joined stand in"
    return gradients


def sum_of_active(number: int, counts: list[int]) -> tuple[dict[str, torch.Tensor], int]:
    active = [loss for loss, count in zip(losses_at(number), counts, strict=True) if number < count]
    mean = average_gradients(OutOfOrder(), active)
    return {name: grad * len(active) for name, grad in mean.items()}, len(active)


@pytest.mark.parametrize("by_size", [True, False], ids=["by the initial size", "by the active ranks"])
@on_ranks(3)
def test_the_divisor(by_size: bool) -> None:
    counts = [2, 4, 3]
    with wrapped(OutOfOrder()) as (model, handle):
        found = uneven(model, handle, counts, divide_by_initial_world_size=by_size)
        for number, grads in enumerate(found):
            total, active = sum_of_active(number, counts)
            for name, grad in grads.items():
                close(grad, total[name] / (3 if by_size else active), 1e-11)


@pytest.mark.parametrize("by_size", [True, False], ids=["by the initial size", "by the active ranks"])
@on_ranks(3)
def test_residuals_of_ranks_that_have_joined_go_out(by_size: bool) -> None:
    counts = [1, 3, 1]
    with wrapped(OutOfOrder(), pycomm.TopK(0.2)) as (model, handle):
        found = uneven(model, handle, counts, divide_by_initial_world_size=by_size)
        received = {name: torch.zeros_like(p) for name, p in model.module.named_parameters()}
        for grads in found if dist.get_rank() == 1 else []:
            for name, grad in grads.items():
                received[name] += grad
        left = residuals_of(handle)
        own = handle.state_dict()["ranks"][str(dist.get_rank())]["middle.weight"]["residual"]
        for name, total in received.items():
            dist.broadcast(total, 1)
            wanted = torch.zeros_like(total)
            for number in range(3):
                of_step, active = sum_of_active(number, counts)
                wanted += of_step[name] / (3 if by_size else active)
            close(total + left.get(name, 0.0), wanted, 1e-10)
        if dist.get_rank() != 1:
            share = float(own.count_nonzero()) / own.numel()
            assert 0.3 < share < 0.5, f"{share}: one share of a fifth has gone out in each of three steps"


@on_ranks(2)
def test_the_next_epoch_is_as_the_first() -> None:
    with wrapped(make_model(), pycomm.TopK(0.5)) as (model, handle):
        for epoch in range(2):
            counts = [1, 2]
            rank = dist.get_rank()
            with model.join(divide_by_initial_world_size=False):
                for number in range(counts[rank]):
                    model.zero_grad()
                    loss_of(model, rank, number).backward()
            assert handle.stats()["steps"] == 2 * (epoch + 1)
        model.zero_grad()
        before = residuals_of(handle)
        loss_of(model, dist.get_rank(), 5).backward()  # outside of join() all are active again
        left, wanted = residuals_of(handle), average_gradients(make_model(), losses_at(5))
        for name, p in model.module.named_parameters():
            close(p.grad + left.get(name, 0.0), wanted[name] + before.get(name, 0.0), 1e-10)
