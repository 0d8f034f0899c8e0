"""Training on "pycomm" whose group is reconfigured: from three ranks to two and back, with torch's own means."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.backend.test_reconfigure import TORCH, begin, group, reconfigure, wait_for_all
from tests.backend.worlds import RELEASE, on_world
from tests.models import perceptron

pytestmark = pytest.mark.skipif(RELEASE < (2, 14), reason="torch reconfigures groups from 2.14 on")

SIZE, AWAY = 3, 1
STEPS = 4  # with each world
WORLDS = [(0, 1, 2), (0, 2), (0, 1, 2)]


def small_model() -> nn.Sequential:
    return perceptron(6, 8, 2, dtype=torch.float32)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def expected() -> list[torch.Tensor]:
    """What one process comes to, in float64."""
    model = small_model().double()
    optimizer = optimizer_of(model)
    for i, world in enumerate(WORLDS):
        for step in range(STEPS * i, STEPS * (i + 1)):
            optimizer.zero_grad()
            torch.stack([loss_of(model, rank, step) for rank in world]).mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def share_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give all ranks what rank 0 of the group has: it is never the one that was away."""
    with torch.no_grad():
        for p in model.parameters():
            for tensor in (p, optimizer.state[p]["momentum_buffer"]):
                dist.broadcast(tensor.to_local() if isinstance(tensor, DTensor) else tensor, group_src=0)


def go_through_worlds(wrap: Callable[[], nn.Module], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train in each world, whose group it is, what ``wrap`` returns there, on those that belong to it."""
    rank, everyone = begin(), handles_of_all()
    for i, world in enumerate(WORLDS):
        if rank in world:
            reconfigure(i + 1, [everyone[peer] for peer in world])
            assert dist.get_world_size() == len(world)
            if i == len(WORLDS) - 1:
                share_state(model, optimizer)
            wrapped = wrap()
            for step in range(STEPS * i, STEPS * (i + 1)):
                optimizer.zero_grad()
                loss_of(wrapped, rank, step).backward()
                optimizer.step()
        wait_for_all(f"world {i}")


def handles_of_all() -> list[str]:
    store, mine = group().get_group_store(), dist.get_rank()
    store.set(f"handle/{mine}", TORCH._get_reconfigure_handle())
    return [store.get(f"handle/{rank}").decode() for rank in range(SIZE)]


def close(model: nn.Module) -> None:
    for p, wanted in zip(model.parameters(), expected(), strict=True):
        mine = p.full_tensor() if isinstance(p, DTensor) else p
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-6)


@on_world(SIZE, enable_reconfigure=True)
def test_ddp() -> None:
    model = small_model()
    optimizer = optimizer_of(model)

    go_through_worlds(lambda: DistributedDataParallel(model), model, optimizer)  # of each world's ranks
    close(model)


@on_world(SIZE, enable_reconfigure=True)
def test_replicas_of_fsdp2() -> None:
    """Each replica is sharded by itself; what FSDP calls after its reduce-scatter averages over the replicas."""
    model = small_model()
    rank = dist.get_rank()
    alone = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(alone, "cpu")
    fully_shard(model, mesh=mesh)
    model.set_all_reduce_hook(lambda gradients: dist.all_reduce(gradients, dist.ReduceOp.AVG))  # type: ignore[operator]
    optimizer = optimizer_of(model)

    go_through_worlds(lambda: model, model, optimizer)
    close(model)


@on_world(SIZE, enable_reconfigure=True)
def test_ddp_goes_on_after_an_operation_has_failed() -> None:
    """A rank gives up in the middle of a step; the others make the step again with a new group, as torchft does."""
    model = small_model()
    optimizer = optimizer_of(model)
    rank, everyone = begin(), handles_of_all()
    reconfigure(1, everyone)
    ddp = DistributedDataParallel(model)
    loss = loss_of(ddp, rank, 0)
    if rank == AWAY:
        group().abort()
    else:
        time.sleep(0.2)
        with pytest.raises(pycomm.CommError):
            loss.backward()
        reconfigure(2, [everyone[peer] for peer in (0, 2)])
        ddp = DistributedDataParallel(model)
        optimizer.zero_grad()
        loss_of(ddp, rank, 0).backward()
        optimizer.step()
        alone = small_model()
        torch.stack([loss_of(alone, peer, 0) for peer in (0, 2)]).mean().backward()
        for p, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, other.grad)
    wait_for_all("done")
