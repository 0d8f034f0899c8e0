"""Hybrids on real processes: replicas of stages of split layers, with any compressor between replicas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import parallel
from tests.backend.worlds import on_world
from tests.models import mean_square, perceptron
from tests.reducer.attaching import grouped

WIDTH, STEPS = 8, 20
EXACT: Any = {"rtol": 0, "atol": 1e-12}
SPLIT = {"*.0": "columns", "*.2": "rows"}
LOSSLESS = {"dense": None, "topk": pycomm.TopK(1.0)}
LOSSY = {
    "fp16": pycomm.FP16(),
    "bf16": pycomm.BF16(),
    "int8": pycomm.Int8(),
    "onebit": pycomm.OneBit(),
    "topk": pycomm.TopK(0.1),
    "dgc": pycomm.DGC(0.1),
    "powersgd": pycomm.PowerSGD(1),
    "qsgd": pycomm.QSGD(16),
    "randomk": pycomm.RandomK(0.2),
}


def layers() -> list[nn.Module]:
    """Stages of two layers each, the same on every rank."""
    torch.manual_seed(0)
    return [perceptron(WIDTH, 2 * WIDTH, WIDTH, seed=None) for _ in range(2)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).unbind()
    return x, y


def full(param: torch.Tensor) -> torch.Tensor:
    """The whole of a parameter, of which this rank may have a part."""
    whole: Any = param.detach()
    found: torch.Tensor = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
    return found


def train(mesh: Any, compression: Any, optimizer_of: Any, clip: float | None = None) -> parallel.Pipeline:
    """Train over the mesh: stages over "pp", the batch over "dp", layers over "tp" where the mesh has these."""
    pipeline = parallel.Pipeline(layers(), mesh, "one_f_one_b", microbatches=2, loss=mean_square)
    if "tp" in mesh.mesh_dim_names:
        parallel.split(pipeline.module, mesh, SPLIT)
    optimizer = optimizer_of(pipeline.module.parameters())
    reducer = pycomm.attach(optimizer, pipeline.module, process_group=mesh["dp"], compression=compression)
    replica, replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for step in range(STEPS):
        x, y = (whole.tensor_split(replicas)[replica] for whole in batch(step))
        optimizer.zero_grad()
        pipeline.step(x, target=y)
        if clip is not None:
            reducer.clip_grad_norm(clip)
        optimizer.step()
    reducer.detach()
    return pipeline


def one_process(optimizer_of: Any, clip: float | None = None) -> nn.Sequential:
    """Train the same in this process alone."""
    model = nn.Sequential(*layers())
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        mean_square(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def require_equal(pipeline: parallel.Pipeline, whole: nn.Sequential) -> None:
    for number, module in pipeline.stages.items():
        for (name, found), expected in zip(module.named_parameters(), whole[number].parameters(), strict=True):
            torch.testing.assert_close(full(found), expected.detach(), **EXACT, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("optimizer_of", [sgd, adamw])
@on_world(4)
def test_two_operators_on_two_pairs_equal_one_process(optimizer_of: Any) -> None:
    """Two operators on devices 1-2 and 3-4, the batch halved on each pair."""
    require_equal(train(parallel.mesh(pp=2, dp=2), None, optimizer_of), one_process(optimizer_of))


@pytest.mark.parametrize("method", LOSSLESS)
@on_world(8, timeout=110, fresh=True)
def test_eight_ranks_equal_one_process(method: str) -> None:
    mesh = parallel.mesh(pp=2, dp=2, tp=2)
    for optimizer_of in (sgd, adamw):
        require_equal(train(mesh, LOSSLESS[method], optimizer_of), one_process(optimizer_of))


@on_world(4, timeout=110)
def test_clipping_is_by_the_norm_of_the_whole_model() -> None:
    for mesh in (parallel.mesh(pp=2, dp=2), parallel.mesh(pp=2, dp=1, tp=2)):
        require_equal(train(mesh, None, sgd, clip=0.05), one_process(sgd, clip=0.05))


@on_world(2)
def test_a_gradient_that_overflows_in_one_stage_stops_the_step_in_all() -> None:
    mesh = parallel.mesh(pp=2, dp=1)
    for scaler in (pycomm.LossScaler(init_scale=1.0), torch.amp.GradScaler("cpu", init_scale=1.0)):
        pipeline = parallel.Pipeline(layers(), mesh, microbatches=2, loss=lambda y, t: scaler.scale(mean_square(y, t)))  # noqa: B023
        optimizer = sgd(pipeline.module.parameters())
        options = {"process_group": mesh["dp"], "loss_scaler": scaler, "compression": pycomm.TopK(1.0)}
        reducer = pycomm.attach(optimizer, pipeline.module, **grouped(**options))
        before = copy.deepcopy(list(pipeline.module.parameters()))
        if dist.get_rank() == 0:  # the gradient of the first stage's own weights alone
            next(pipeline.module.parameters()).register_hook(lambda grad: grad * float("inf"))
        x, y = batch(0)
        pipeline.step(x, target=y)
        scaler.step(optimizer)
        scaler.update()
        for param, old in zip(pipeline.module.parameters(), before, strict=True):
            assert torch.equal(param, old)
        assert scaler.get_scale() == 0.5
        reducer.detach()


@pytest.mark.slow
@on_world(8, timeout=110, fresh=True)
def test_every_compressor_keeps_replicas_equal_and_learns() -> None:
    mesh = parallel.mesh(pp=2, dp=2, tp=2)
    whole = one_process(sgd)
    for name, compression in LOSSY.items():
        pipeline = train(mesh, copy.deepcopy(compression), plain_sgd if name == "dgc" else sgd)  # DGC has the momentum
        for number, module in pipeline.stages.items():
            for found, start, end in zip(
                module.parameters(), layers()[number].parameters(), whole[number].parameters(), strict=True
            ):
                local: Any = found.detach()
                local = local.to_local() if hasattr(local, "to_local") else local
                everyone = [torch.empty_like(local) for _ in range(2)]
                dist.all_gather(everyone, local.contiguous(), group=mesh["dp"].get_group())
                assert torch.equal(*everyone), name
                # As far as one process got, more or less: it went the same way.
                moved, wanted = full(found) - start.detach(), (end - start).detach()
                assert torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0) > 0.3, name
