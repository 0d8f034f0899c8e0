"""Models that torch splits over ranks, on "pycomm": DTensor, FSDP of both kinds, tensor parallelism, and combined."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.backend.worlds import on_world

SAMPLES, WIDTH = 8, 6


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def data(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))


def losses(model: nn.Module, parts: int = 1, part: int = 0) -> list[float]:
    """Return the mean losses of four steps of Adam on the ``part`` of the samples that this rank has."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        loss = model(data(step).chunk(parts)[part]).square().mean()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if parts > 1:
            dist.all_reduce(total)
        found.append(total.item() / (dist.get_world_size() if parts > 1 else 1))
    return found


def close(found: list[float]) -> None:
    torch.testing.assert_close(found, losses(make_model()), rtol=1e-4, atol=1e-6)


@on_world(2, 4)
def test_dtensors_change_their_placement() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(40.0).view(8, 5)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert sharded.to_local().shape[0] == 8 // dist.get_world_size()
    assert torch.equal(sharded.full_tensor(), whole)
    other_way = sharded.redistribute(mesh, [Shard(1)])
    assert torch.equal(other_way.redistribute(mesh, [Replicate()]).to_local(), whole)
    partial = DTensor.from_local(whole, mesh, [Partial()])
    assert torch.equal(partial.full_tensor(), whole * dist.get_world_size())
    other = distribute_tensor(whole.T.contiguous(), mesh, [Replicate()])
    product: Any = sharded @ other
    torch.testing.assert_close(product.full_tensor(), whole @ whole.T)
    assert torch.equal(partial.redistribute(mesh, [Shard(0)]).full_tensor(), whole * dist.get_world_size())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_world(2)
def test_fsdp1(strategy: str) -> None:
    model = FullyShardedDataParallel(
        make_model(), sharding_strategy=ShardingStrategy[strategy], device_id=torch.device("cpu"), use_orig_params=True
    )
    close(losses(model, 2, dist.get_rank()))
    shapes = [{tuple(x.shape) for x in any_model.state_dict().values()} for any_model in (model, make_model())]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("reshard", [True, False])
@on_world(2)
def test_fsdp2(reshard: bool) -> None:
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    close(losses(model, 2, dist.get_rank()))
    first: Any = model[0].weight
    assert isinstance(first, DTensor)
    assert first.to_local().shape == (4, WIDTH)


@on_world(2)
def test_fsdp2_with_memory_from_the_group() -> None:
    model: Any = fully_shard(make_model())
    model.set_allocate_memory_from_process_group_for_comm(True)
    close(losses(model, 2, dist.get_rank()))


@on_world(4)
def test_hybrid_sharding() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(make_model(), mesh=mesh)
    close(losses(model, 4, dist.get_rank()))


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


@on_world(2)
def test_tensor_parallelism() -> None:
    model = parallelize_module(make_model(), init_device_mesh("cpu", (2,)), PLAN)
    close(losses(model))


@on_world(4)
def test_tensor_parallelism_within_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = parallelize_module(copy.deepcopy(make_model()), mesh["model"], PLAN)
    fully_shard(model, mesh=mesh["data"])
    close(losses(model, 2, mesh.get_local_rank("data")))
