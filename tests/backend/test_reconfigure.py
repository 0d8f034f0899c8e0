"""Groups on "pycomm" whose members change, as torch's own tests of fault tolerance have them change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.backend.worlds import RELEASE, on_world

pytestmark = pytest.mark.skipif(RELEASE < (2, 14), reason="torch reconfigures groups from 2.14 on")

TORCH: Any = dist
reconfigurable = on_world(3, enable_reconfigure=True)


def group() -> Any:
    return dist.group.WORLD


def handles(when: str) -> list[str]:
    """Return the handles of all three ranks, which tell each other by the group's store."""
    store = group().get_group_store()
    store.set(f"{when}/{START[0]}", TORCH._get_reconfigure_handle())
    return [store.get(f"{when}/{rank}").decode() for rank in range(3)]


START = [0]
"""Rank of this process when its group was made."""


def begin() -> int:
    START[0] = dist.get_rank()
    return START[0]


def reconfigure(uuid: int, members: Sequence[str] | set[str]) -> None:
    assert TORCH._reconfigure(uuid, members, timeout=timedelta(seconds=20)).wait()


def total() -> float:
    x = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x[-1].item()


def wait_for_all(when: str) -> None:
    store = group().get_group_store()
    store.set(f"{when}/{START[0]}", "here")
    store.wait([f"{when}/{rank}" for rank in range(3)])


@reconfigurable
def test_nothing_works_before() -> None:
    begin()
    assert TORCH._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (START[0], 3)
    with pytest.raises(RuntimeError, match="before reconfigure"):
        dist.all_reduce(torch.ones(1))
    reconfigure(1, handles("all"))
    assert total() == 6.0


@reconfigurable
def test_collectives_and_messages_after() -> None:
    rank = begin()
    reconfigure(1, handles("all"))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 3)
    x = torch.zeros(4)
    works: list[Any] = [dist.isend(torch.full((4,), float(rank)), (rank + 1) % 3), dist.irecv(x, (rank - 1) % 3)]
    for work in works:
        work.wait()
    assert x[0].item() == (rank - 1) % 3
    reconfigure(2, handles("again"))
    assert total() == 6.0


@pytest.mark.parametrize("left_out", [0, 1, 2])
@reconfigurable
def test_a_rank_is_left_out(left_out: int) -> None:
    rank = begin()
    everyone = handles("all")
    reconfigure(1, everyone)
    if rank != left_out:
        reconfigure(2, [handle for peer, handle in enumerate(everyone) if peer != left_out])
        assert dist.get_world_size() == 2
        assert dist.get_rank() == rank - (rank > left_out)
        assert dist.get_process_group_ranks(group()) == [0, 1]
        assert total() == 3.0
        x = torch.full((2,), 42.0 * (dist.get_rank() == 0))
        dist.broadcast(x, group_src=0)
        assert x[0].item() == 42.0
        ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False))
        ddp(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
        weight: Any = ddp.module.weight
        assert weight.grad.tolist() == [[1.5, 1.5, 1.5]]
    wait_for_all("done")


@reconfigurable
def test_the_list_is_the_order() -> None:
    rank = begin()
    reconfigure(1, handles("all")[::-1])
    assert dist.get_rank() == 2 - rank
    reconfigure(2, set(handles("again")))
    assert dist.get_rank() == rank


@reconfigurable
def test_alone_together_and_alone() -> None:
    rank = begin()
    reconfigure(10 + rank, [TORCH._get_reconfigure_handle()])
    assert (dist.get_rank(), dist.get_world_size(), total()) == (0, 1, 1.0)
    reconfigure(20, handles("all"))
    assert total() == 6.0
    reconfigure(30 + rank, [TORCH._get_reconfigure_handle()])
    assert total() == 1.0


@reconfigurable
def test_two_groups_merge() -> None:
    rank = begin()
    everyone = handles("all")
    reconfigure(*((1, everyone[:1]) if rank == 0 else (2, everyone[1:])))
    assert total() == (1.0 if rank == 0 else 3.0)
    reconfigure(3, everyone)
    assert total() == 6.0


@reconfigurable
def test_after_an_abort() -> None:
    begin()
    reconfigure(1, handles("all"))
    group().abort()
    with pytest.raises(RuntimeError):
        total()
    reconfigure(2, handles("again"))
    assert total() == 6.0


@reconfigurable
def test_after_a_timeout() -> None:
    rank = begin()
    everyone = handles("all")
    reconfigure(1, everyone)
    group().set_timeout(timedelta(seconds=0.5))
    if rank == 0:
        time.sleep(1.5)
    else:
        with pytest.raises(pycomm.CommError):
            total()
    group().set_timeout(timedelta(seconds=20))
    reconfigure(2, everyone)
    assert total() == 6.0


@reconfigurable
def test_mistakes() -> None:
    rank = begin()
    reconfigure(10 + rank, [TORCH._get_reconfigure_handle()])
    with pytest.raises(RuntimeError, match="already used"):
        reconfigure(10 + rank, [TORCH._get_reconfigure_handle()])
    with pytest.raises(ValueError, match="handles are .*wanted one per rank"):
        reconfigure(50, ["another"])
    assert total() == 1.0  # as it was
