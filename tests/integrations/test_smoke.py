"""What scripts use besides attach, each in a few steps: in CPU memory here, and on a GPU by ``bench.gpu check``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.ddp
from tests.horovod.worlds import horovod
from tests.kernels.gpus import requires_cuda
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import attached
from tests.reducer.models import close
from tests.transport.test_nccl_on_gpu import requires_nccl, sharing

__all__ = ["sharing"]

STEPS = 4
Use = Callable[[torch.device, Path], None]


def model_on(device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 5)).to(device, dtype)


def batch(step: int, rank: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 12, generator=generator).to(device, dtype)


def loss_of(model: Any, step: int, rank: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, rank, device, dtype)).float().square().mean()
    return loss


def alone(device: torch.device, steps: int = STEPS) -> list[torch.Tensor]:
    """Return the parameters after steps of SGD on the batches of all ranks."""
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = dist.get_world_size()
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, rank, device) for rank in range(size)]).mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def train(model: Any, optimizer: Any, device: torch.device, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, dist.get_rank(), device).backward()
        optimizer.step()


def assert_as_alone(params: Any, device: torch.device, tolerance: float = 1e-5) -> None:
    for param, wanted in zip(params, alone(device), strict=True):
        close(param.detach(), wanted, tolerance)


def ddp_hook(device: torch.device, _: Path) -> None:
    for method, tolerance in ((None, 1e-5), (pycomm.FP16(), 1e-2)):
        model = model_on(device)
        ddp = DistributedDataParallel(model)
        handle = pycomm.ddp.register(ddp, compression=method, timeout=30)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), device)
        assert_as_alone(model.parameters(), device, tolerance)
        handle.remove()


def fsdp2_on_the_backend(device: torch.device, _: Path) -> None:
    group = dist.new_group(backend="pycomm")
    model: Any = fully_shard(model_on(device), mesh=DeviceMesh.from_group(group, device.type))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), device)
    assert_as_alone([param.full_tensor() for param in model.parameters()], device)
    dist.destroy_process_group(group)


def checkpoint(device: torch.device, folder: Path) -> None:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with attached(optimizer, model, compression=pycomm.TopK(0.1)) as reducer:
        train(model, optimizer, device)
        pycomm.save(folder, reducer, step=STEPS).wait()
        train(model, optimizer, device, range(STEPS, 2 * STEPS))
        wanted = copy.deepcopy([param.detach() for param in model.parameters()])
        assert pycomm.load(folder, reducer)["step"] == STEPS
        train(model, optimizer, device, range(STEPS, 2 * STEPS))
        for param, value in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(param.detach(), value)


def horovods_optimizer(device: torch.device, _: Path) -> None:
    with horovod() as hvd:
        model = model_on(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        averaged = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        train(model, averaged, device)
        assert_as_alone(model.parameters(), device)


def compiled(device: torch.device, _: Path) -> None:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(optimizer, model):
        train(torch.compile(model, backend="aot_eager"), optimizer, device)
    assert_as_alone(model.parameters(), device)


def scaler_with_kernels(device: torch.device, _: Path) -> None:
    """Steps by pycomm's kernels, of float32 weights and of float32 masters; one overflows on one rank.

    All ranks leave that one out, and halve the scale.
    """
    for dtype in (torch.float32, torch.float16):
        model = model_on(device, dtype)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        (pycomm.fuse if dtype == torch.float32 else pycomm.master_weights)(optimizer)
        scaler = pycomm.LossScaler(init_scale=1024.0)
        with attached(optimizer, model, loss_scaler=scaler) as reducer:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, step, dist.get_rank(), device, dtype)
                scaler.scale(loss * (torch.inf if (step, dist.get_rank()) == (2, 1) else 1.0)).backward()
                norm = reducer.clip_grad_norm(0.5)
                assert bool(torch.isfinite(norm)) == (step != 2)
                scaler.step(optimizer)
                scaler.update()
        assert float(scaler.get_scale()) == 512.0
        assert all(bool(torch.isfinite(param).all()) for param in model.parameters())


USES: dict[str, Use] = {
    each.__name__: each
    for each in (ddp_hook, fsdp2_on_the_backend, checkpoint, horovods_optimizer, compiled, scaler_with_kernels)
}


@pytest.mark.parametrize("what", USES)
@on_ranks(2)
def test_in_cpu_memory(what: str, tmp_path: Path) -> None:
    USES[what](torch.device("cpu"), tmp_path)


def on_a_gpu(what: str, folder: Path) -> None:
    torch.cuda.set_device(0)
    USES[what](torch.device("cuda", 0), folder)


@requires_cuda
@requires_nccl
@pytest.mark.parametrize("what", USES)
def test_on_a_gpu(sharing: RankPool, what: str, tmp_path: Path) -> None:
    sharing.run(on_a_gpu, what, tmp_path)
