"""Replicas of a sharded model that do not use the same modules, or leave out batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pycomm
from pycomm.ddp import register_hsdp
from pycomm.ddp.replicas import ReplicaSteps
from tests.on_ranks import on_ranks

PARTS = 4
Uses = Callable[[int, int, int], list[int]]
"""Modules that a replica uses, in their order, in a step and part of it."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()

    def forward(self, x: torch.Tensor, uses: list[int]) -> torch.Tensor:
        for index in uses:
            x = torch.tanh(self.layers[index](x))
        return x


def loss_of(net: Any, rank: int, number: int, uses: list[int]) -> torch.Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * number + rank), dtype=torch.float64)
    return (net(x, uses).double() - 1).square().mean() / PARTS


@contextlib.contextmanager
def replicated(shards: int, compression: Any = None, **options: Any) -> Iterator[tuple[Any, Any]]:
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    net: Any = Net()
    for module in (*net.layers, net):
        fully_shard(module, mesh=mesh["shard"], **options)
    handle = register_hsdp(net, mesh["replicate"], compression=compression, timeout=20)
    try:
        yield net, handle
    finally:
        handle.remove()


def only_last_on_one(replica: int, number: int, part: int) -> list[int]:
    return [0, 1] if replica == 1 and part == PARTS - 1 else [0]


def never_on_one(replica: int, number: int, part: int) -> list[int]:
    return [0, 2] if replica == 1 else [1, 0]


def in_another_order(replica: int, number: int, part: int) -> list[int]:
    return [0, 1, 2] if replica == part % 2 else [2, 0, 1]


def first_modules_on_one(replica: int, number: int, part: int) -> list[int]:
    return [2] if replica == 0 else [0, 1, 2]


USES: list[Uses] = [only_last_on_one, never_on_one, in_another_order, first_modules_on_one]


def trained(net: Any, size: int, uses: Uses, rank: int | None) -> dict[str, torch.Tensor]:
    """What training comes to: on this ``rank``'s data, or on that of all ``size`` ranks."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    ranks = range(size) if rank is None else [rank]
    for number in range(3):
        optimizer.zero_grad()
        for part in range(PARTS):
            for each in ranks:
                used = uses(each // (size // 2), number, part)
                (loss_of(net, each, number * PARTS + part, used) / len(ranks)).backward()
        optimizer.step()
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in net.named_parameters()}
    return {name: p.detach().clone() for name, p in whole.items()}


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod",
    "use a layer on some HSDP replicas only",
    "The others contribute zeros.",
)
@pytest.mark.parametrize("uses", USES)
@on_ranks(2, 4, timeout=60)
def test_replicas_may_use_other_modules(uses: Uses) -> None:
    size = dist.get_world_size()
    with replicated(size // 2) as (net, _):
        mine = trained(net, size, uses, dist.get_rank())
    for name, right in trained(Net(), size, uses, None).items():
        torch.testing.assert_close(mine[name], right, rtol=1e-10, atol=1e-12)


def same_each_time(replica: int, number: int, part: int) -> list[int]:
    return [0, 1, 2]


def always_others_on_one(replica: int, number: int, part: int) -> list[int]:
    return [0, 1] if replica == 0 else [0, 2]


def others_later(replica: int, number: int, part: int) -> list[int]:
    return [0, 1, 2] if number == 0 else ([1] if number == 1 else [2, 0])


@pytest.mark.parametrize(
    ("uses", "meetings"),
    [
        # Each of the first two passes: once per turn, and at its end. Each of the other ten: at its end.
        (same_each_time, 2 * 4 + 10),
        (always_others_on_one, 2 * 4 + 10),
        # The fifth pass has one turn that was expected, and two that no replica has used. So the sixth meets at its
        # turn, and the next two do not. The ninth has one expected turn, used by none, and two others, as the tenth.
        (others_later, 2 * 4 + 2 + (1 + 2 + 2 * 1) + (3 + 3 + 2 * 1)),
    ],
    ids=["same", "others", "later"],
)
@on_ranks(2, timeout=60)
def test_hosts_meet_once_per_pass_after_two_with_the_same_turns(uses: Uses, meetings: int) -> None:
    with replicated(1) as (net, handle), pytest.MonkeyPatch.context() as patch:
        found, meet = itertools.count(), ReplicaSteps._meet
        patch.setattr(ReplicaSteps, "_meet", lambda steps, place: (next(found), meet(steps, place))[1])
        mine = trained(net, 2, uses, dist.get_rank())
        assert next(found) == meetings
        assert handle.stats()["steps"] == 3 * PARTS
    for name, right in trained(Net(), 2, uses, None).items():
        torch.testing.assert_close(mine[name], right, rtol=1e-10, atol=1e-12)


@on_ranks(4, timeout=60)
def test_with_residuals_and_another_dtype_replicas_stay_equal() -> None:
    halves = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16, cast_forward_inputs=True)
    for options in ({"compression": pycomm.TopK(0.3)}, {"mp_policy": halves}):
        with replicated(2, **options) as (net, handle):
            mine = trained(net, 4, never_on_one, dist.get_rank())
            assert handle.stats()["nonfinite_steps"] == 0
        everyones: list[Any] = [None] * 4
        dist.all_gather_object(everyones, mine)
        right = trained(Net(), 4, never_on_one, None)
        for name, tensor in mine.items():
            assert all(torch.equal(other[name], tensor) for other in everyones)
            if "mp_policy" in options:
                torch.testing.assert_close(tensor, right[name], rtol=0.02, atol=0.005)


@pytest.mark.behavior(
    "Ranks that differ",
    "`... left out a batch: ...`",
    "That rank ran `continue` after forward or `zero_grad()`. Use `skip_batch()` or `veto_step()`; under "
    "`pycomm.ddp`, skip it everywhere.",
)
@on_ranks(2, timeout=60, fresh=True)
def test_a_batch_that_one_replica_leaves_out_is_an_error() -> None:
    with replicated(1) as (net, _):
        for number in range(2 + dist.get_rank()):
            loss = loss_of(net, dist.get_rank(), number, [0, 1])
            if number < 2:
                loss.backward()
        loss = loss_of(net, dist.get_rank(), 3, [0, 1])
        with pytest.raises((RuntimeError, pycomm.CommError), match="rank 1 of the replicas left out a batch"):
            loss.backward()


@on_ranks(2, timeout=60, fresh=True)
def test_evaluations_of_one_replica_are_no_error() -> None:
    with replicated(1) as (net, handle):
        for number in range(3):
            loss_of(net, dist.get_rank(), number, [0, 1]).backward()
            if dist.get_rank() == 1:
                with torch.no_grad():
                    loss_of(net, 1, number, [0])
                net.eval()
                loss_of(net, 1, number, [0])
                net.train()
        assert handle.stats()["steps"] == 3
