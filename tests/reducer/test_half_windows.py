"""Accumulation windows of half-precision parameters: passes are added up in float32, and rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached

PASSES = 200


def make(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, 8).to(dtype)


def loss_of(model: nn.Module, rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = 1 + torch.randn(4, 16, generator=generator)
    out: torch.Tensor = model(x.to(dtype))
    return out.float().square().mean() / PASSES


def exact(model: nn.Linear, dtype: torch.dtype) -> list[torch.Tensor]:
    """The mean over ranks of the sums over passes: each gradient as it is in ``dtype``, added up in float64."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for rank in range(dist.get_world_size()):
        for i in range(PASSES):
            grads = torch.autograd.grad(loss_of(model, rank, i, dtype), list(model.parameters()))
            for into, grad in zip(total, grads, strict=True):
                into += grad.double() / dist.get_world_size()
    return total


@pytest.mark.parametrize("end", ["full", "flush", "weights"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_a_long_window_loses_nothing(dtype: torch.dtype, end: str) -> None:
    rank, model = dist.get_rank(), make(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attached(optimizer, model, accumulate=PASSES + (end == "flush")) as reducer:
        for step in range(2):
            wanted = exact(model, dtype)
            optimizer.zero_grad()
            for i in range(PASSES):
                if end == "weights":
                    reducer.set_weight(1 + i % 3)
                scale = PASSES if end == "weights" else 1
                (scale * loss_of(model, rank, i, dtype)).backward()
                assert all(p.grad is None for p in model.parameters()) or i == PASSES - 1
            if end == "flush":
                reducer.flush()
            eps = torch.finfo(dtype).eps
            for param, right in zip(model.parameters(), wanted, strict=True):
                assert param.grad is not None
                assert param.grad.dtype == dtype
                if end != "weights":  # whose mean is another
                    torch.testing.assert_close(
                        param.grad.double(), right, rtol=2 * eps, atol=eps * float(right.abs().max())
                    )
            if step == 0:
                optimizer.step()
        assert_replicas_equal(model)


@pytest.mark.parametrize("whose", ["optimizer", "module", "wrapper"])
@on_ranks(2)
def test_zero_grad_forgets_the_passes_before(whose: str) -> None:
    rank, model = dist.get_rank(), make(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    one: Any = {"optimizer": optimizer, "module": model, "wrapper": nn.Sequential(model)}[whose]
    with attached(optimizer, model, accumulate=2):
        loss_of(model, rank, 0, torch.bfloat16).backward()
        one.zero_grad()
        for _ in range(2):
            (loss_of(model, rank, 2, torch.bfloat16) / 2).backward()
        grads = [torch.autograd.grad(loss_of(model, r, 2, torch.bfloat16), list(model.parameters())) for r in (0, 1)]
        for i, param in enumerate(model.parameters()):
            assert param.grad is not None
            right = (grads[0][i].float() + grads[1][i].float()) / 2
            torch.testing.assert_close(param.grad.float(), right, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 1e-3])
@on_ranks(2)
def test_hooks_that_come_later_see_each_gradient(clip: float | None) -> None:
    rank, model = dist.get_rank(), make(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[torch.Tensor | None] = []
    compression = None if clip is None else pycomm.DGC(1.0, 0.0, clip_local_norm=clip)
    with attached(optimizer, model, accumulate=3, compression=compression):
        for param in model.parameters():
            hook: Any = param.register_post_accumulate_grad_hook
            hook(lambda p: seen.append(None if p.grad is None else p.grad.clone()))
        for step in range(2):
            optimizer.zero_grad()
            for i in range(3):
                loss_of(model, rank, 3 * step + i, torch.bfloat16).backward()
            optimizer.step()
        assert len(seen) == 12
        assert all(grad is not None for grad in seen)
        assert_replicas_equal(model)


@on_ranks(2)
def test_detach_in_a_window_keeps_what_there_is() -> None:
    rank, model = dist.get_rank(), make(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reducer = pycomm.attach(optimizer, model, accumulate=3, tuning=pycomm.Tuning(timeout=30))
    loss_of(model, rank, 0, torch.bfloat16).backward()
    reducer.detach()
    own = torch.autograd.grad(loss_of(model, rank, 0, torch.bfloat16), list(model.parameters()))
    for param, grad in zip(model.parameters(), own, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, grad)
