"""A step that overflows on one rank leaves no trace in compression state, and is skipped by scalers on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.ddp.wrapping import residuals_of, step, wrapped
from tests.on_ranks import on_ranks
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd

SCALE = 1024.0
SCALERS: dict[str, Callable[[], Any]] = {
    "torch's": lambda: torch.amp.GradScaler("cpu", init_scale=SCALE),
    "pycomm's": lambda: pycomm.LossScaler(init_scale=SCALE),
}
METHODS = [pycomm.TopK(0.1), pycomm.DGC(0.1), pycomm.PowerSGD(1)]


def own_state(handle: Any) -> dict[str, Any]:
    state: dict[str, Any] = handle.state_dict()["ranks"][str(dist.get_rank())]
    return state


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[name][key], b[name][key]) for name in a for key in a[name])


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@on_ranks(2)
def test_an_overflow_on_one_rank_leaves_no_trace(method: Any, scaler: str) -> None:
    made = SCALERS[scaler]()
    with wrapped(make_model(), method, made) as (model, handle):
        optimizer = sgd(model)

        def one(number: int, overflows: bool) -> None:
            def loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
                return made.scale(loss_of(model, rank, number)) * (torch.inf if overflows and rank == 1 else 1.0)

            step(model, number, loss)
            made.step(optimizer)
            made.update()

        one(0, overflows=False)
        before, steps = own_state(handle), handle.state_dict()["steps"]
        params = [p.detach().clone() for p in model.parameters()]
        one(1, overflows=True)
        assert all(not torch.isfinite(p.grad).all() for p in model.parameters() if p.dim() > 1)
        assert same(own_state(handle), before)
        assert handle.state_dict()["steps"] == steps == 1
        assert handle.stats()["nonfinite_steps"] == 1
        assert "on rank 1" in handle.stats()["last_nonfinite"]
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), params, strict=True)), "skipped"
        assert made.get_scale() == SCALE / 2
        one(2, overflows=False)
        assert not same(own_state(handle), before)
        assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), params, strict=True))


@pytest.mark.parametrize("scaler", SCALERS)
@on_ranks(2)
def test_state_is_kept_without_the_loss_scale(scaler: str) -> None:
    made = SCALERS[scaler]()
    with wrapped(make_model(), pycomm.TopK(0.05), made) as (model, handle):
        grads = step(model, 0, lambda model, rank, number: made.scale(loss_of(model, rank, number)))
        wanted = average_gradients(make_model(), losses_at(0))
        left = residuals_of(handle)
        for name, grad in grads.items():
            close(grad / SCALE + left.get(name, 0.0), wanted[name], 1e-10)


@on_ranks(2)
def test_without_state_an_overflow_is_seen_by_all() -> None:
    for method in (None, pycomm.FP16()):
        with wrapped(make_model(), method) as (model, handle):
            step(model, 0, lambda model, rank, number: loss_of(model, rank, number) * (torch.inf if rank else 1.0))
            assert all(not torch.isfinite(p.grad).all() for p in model.parameters())
            assert handle.stats()["nonfinite_steps"] == 0, "there is no state to be left unchanged"


@pytest.mark.parametrize("method", [None, pycomm.FP16(), pycomm.BF16(), pycomm.TopK(0.5)], ids=repr)
@on_ranks(2, 3)
def test_all_ranks_know_the_parameter_and_the_rank(method: Any) -> None:
    last = dist.get_world_size() - 1
    with wrapped(make_model(), method, bucket_cap_mb=1e-3) as (model, handle):
        step(model, 0)
        assert handle.stats()["last_nonfinite"] is None
        if dist.get_rank() == last:
            spoiled = model.module.get_parameter("2.weight").register_hook(lambda grad: grad * torch.nan)
        step(model, 1)
        assert handle.stats()["last_nonfinite"] == f"parameter '2.weight' on rank {last}"
        if dist.get_rank() == last:
            spoiled.remove()
        step(model, 2)
        assert handle.stats()["last_nonfinite"] == f"parameter '2.weight' on rank {last}", "it was the last so far"
        assert handle.stats()["num_buckets"] > 1
