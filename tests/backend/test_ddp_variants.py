"""DistributedDataParallel on "pycomm", in its variants, against one process that has all the samples."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.backend.worlds import on_world

SAMPLES, FEATURES = 12, 10


class Branches(nn.Module):
    """Model of which a part does not take part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(FEATURES, 16), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        y: torch.Tensor = self.left(hidden)
        return y + self.right(hidden) if both else y


def data(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(step))


def share(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def train(model: nn.Module, ddp: nn.Module | None, both: bool = True) -> list[torch.Tensor]:
    """Return the parameters after three steps: alone on all samples, or under ``ddp`` on this rank's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x = data(step)
        optimizer.zero_grad()
        y = model(x, both) if ddp is None else ddp(share(x), both)
        y.square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def compare(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = Branches()
    both = not options.get("find_unused_parameters", False)
    expected = train(copy.deepcopy(model), None, both)
    hook = options.pop("hook", None)
    ddp = DistributedDataParallel(model, **options)
    if hook is not None:
        ddp.register_comm_hook(None, getattr(default_hooks, hook))
    tolerance = 1e-2 if hook == "fp16_compress_hook" else 1e-6
    torch.testing.assert_close(train(model, ddp, both), expected, rtol=tolerance, atol=tolerance)
    return ddp


@pytest.mark.parametrize("bucket_cap_mb", [25.0, 0.0001])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
        {"hook": "allreduce_hook"},
        {"hook": "fp16_compress_hook"},
    ],
    ids=str,
)
@on_world(2)
def test_equals_one_process(options: dict[str, Any], bucket_cap_mb: float) -> None:
    compare(bucket_cap_mb=bucket_cap_mb, **options)


@on_world(3)
def test_of_three_ranks() -> None:
    compare()


@on_world(2)
def test_a_hook_of_torch_with_state() -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branches())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(ddp.module, ddp)
    for param in ddp.parameters():
        assert torch.isfinite(param).all()
        same = param.detach().clone()
        dist.broadcast(same, 0)
        assert torch.equal(same, param)


@on_world(2)
def test_accumulation_without_synchronization() -> None:
    torch.manual_seed(0)
    model = Branches()
    whole = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        ddp(share(data(0))).square().mean().backward()
    ddp(share(data(1))).square().mean().backward()
    for step in range(2):
        whole(data(step)).square().mean().backward()
    found = [param.grad for param in model.parameters()]
    torch.testing.assert_close(found, [param.grad for param in whole.parameters()])


@on_world(3)
def test_uneven_inputs() -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(FEATURES, 1))
    steps = 2 + dist.get_rank()
    with ddp.join():
        for step in range(steps):
            ddp(data(step)).sum().backward()
    same = ddp.module.weight.detach().clone()
    dist.broadcast(same, 0)
    assert torch.equal(same, ddp.module.weight)


@on_world(2)
def test_a_sharded_optimizer() -> None:
    torch.manual_seed(0)
    model = Branches()
    expected = train(copy.deepcopy(model), None)
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with Join([ddp, optimizer]):
        for step in range(3):
            optimizer.zero_grad()
            ddp(share(data(step))).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close([param.detach() for param in model.parameters()], expected)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


@on_world(2)
def test_buffers_follow_rank_0() -> None:
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)))
    for step in range(2):
        ddp(share(data(step))).sum().backward()
    ddp(share(data(5)))
    dist.barrier()
    norm = ddp.module[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 3


@on_world(2)
def test_parameters_that_differ_are_refused() -> None:
    model = nn.Linear(3, 2 + dist.get_rank())
    with pytest.raises(RuntimeError):  # on rank 0, because rank 1 has gone
        DistributedDataParallel(model)
