"""attach on a real GPU. What is the same on all devices is tested elsewhere; here: streams, memory and autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.kernels.gpus import requires_cuda, waits_refused
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, own_state
from tests.reducer.models import average_gradients, close, make_model
from tests.transport.test_nccl_on_gpu import requires_nccl, sharing

__all__ = ["sharing"]
pytestmark = [requires_cuda, requires_nccl]


def gpu_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Return what ``loss_of`` does, on the GPU."""
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
    return (model(x) ** 2).mean()


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("compression", [pycomm.TopK(1.0), pycomm.TopK(0.1)])
def test_backward_does_not_wait(compression: Any) -> None:
    """Also with a loss scale, autocast and overflow; TopK is at work with one rank too.

    The first pass may wait: tables that stay are copied to the GPU in it.
    """
    model = make_model(dtype=torch.float32).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    with attached(optimizer, model, compression=compression, loss_scaler=scaler) as reducer:
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = gpu_loss(model, 0, step)
            scaled = scaler.scale(loss * (torch.inf if step == 2 else 1.0))
            with waits_refused() if step > 0 else nullcontext():
                scaled.backward()
            scaler.step(optimizer)
            scaler.update()
        assert reducer.stats()["nonfinite_steps"] == 1
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
        for entry in own_state(reducer).values():
            assert bool(torch.isfinite(entry["residual"]).all())


@pytest.mark.usefixtures("one_rank_group")
def test_everything_sent_is_the_plain_gradient() -> None:
    model = make_model(dtype=torch.float32).cuda()
    plain = make_model(dtype=torch.float32).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model, compression=pycomm.TopK(1.0)):
        for step in range(4):
            optimizer.zero_grad()
            gpu_loss(model, 0, step).backward()
            wanted = torch.autograd.grad(gpu_loss(plain, 0, step), list(plain.parameters()))
            for p, w in zip(model.parameters(), wanted, strict=True):
                close(p.grad, w, 1e-6)


def train(compression: Any, tolerance: float) -> None:
    size = dist.get_world_size()
    model = make_model(dtype=torch.float32).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with attached(optimizer, model, compression=compression, bucket_mb=0.002):
        for step in range(5):
            losses: list[Callable[[nn.Module], torch.Tensor]] = [
                lambda m, r=rank, s=step: gpu_loss(m, r, s)  # type: ignore[misc]
                for rank in range(size)
            ]
            wanted = average_gradients(model, losses)
            optimizer.zero_grad()
            gpu_loss(model, dist.get_rank(), step).backward()
            for name, p in model.named_parameters():
                close(p.grad, wanted[name], tolerance)
            optimizer.step()


@pytest.mark.parametrize(
    ("compression", "tolerance"), [(None, 1e-6), (pycomm.FP16(), 1e-3), (pycomm.BF16(), 1e-2), (pycomm.TopK(1.0), 1e-6)]
)
def test_two_ranks(sharing: RankPool, compression: Any, tolerance: float) -> None:
    sharing.run(train, compression, tolerance)


def train_whole_steps(scaled: bool) -> None:
    """Adafactor's steps, shared out by whole parameters, are those of every rank's own step."""
    ends = []
    for shard in (None, "optimizer"):
        model = make_model(dtype=torch.float32).cuda()
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
        scaler = torch.amp.GradScaler("cuda", enabled=scaled)
        options: dict[str, Any] = {"loss_scaler": scaler} if scaled else {}
        with attached(optimizer, model, shard=shard, bucket_mb=0.002, **options) as reducer:
            for step in range(10):
                optimizer.zero_grad()
                loss = gpu_loss(model, dist.get_rank(), step) * (torch.inf if scaled and step == 6 else 1.0)
                with waits_refused() if step > 5 else nullcontext():
                    scaler.scale(loss).backward()
                    norm = reducer.clip_grad_norm(0.5) if not scaled else None
                scaler.step(optimizer)
                scaler.update()
            assert norm is None or bool(torch.isfinite(norm))
            state = sorted(optimizer.state_dict()["state"].items())
            variances = [entry[key] for _, entry in state for key in sorted(entry) if key.endswith(("var", "variance"))]
            assert variances
            ends.append([x.detach().cpu() for x in (*model.parameters(), *variances)])
            assert_replicas_equal(copy.deepcopy(model).cpu())
    for found, wanted in zip(*ends, strict=True):
        close(found, wanted, 1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_whole_steps(sharing: RankPool, scaled: bool) -> None:
    sharing.run(train_whole_steps, scaled)


@pytest.mark.usefixtures("one_rank_group")
def test_cpu_and_gpu_parameters_together_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).cuda())
    with pytest.raises(ValueError, match=r"parameter '1.weight' is on device cuda:0, others on cpu"):
        pycomm.attach(torch.optim.SGD(model.parameters(), lr=0.1), model)
