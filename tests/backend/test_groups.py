"""Groups on "pycomm" beside the default one: made, split, destroyed, made again; and what waits in them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.worlds import on_world, world
from tests.on_ranks import on_ranks


def total(group: dist.ProcessGroup | None = None) -> float:
    """Return the sum of the global ranks of the members of ``group``, as an all-reduce finds it."""
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x, group=group)
    return x.item()


@on_world(3)
def test_a_group_of_some() -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert total() == 3.0
        return
    assert dist.get_backend(group) == dist.get_backend()
    assert dist.get_group_rank(group, 2) == 1
    assert total(group) == 2.0
    assert total() == 3.0
    dist.destroy_process_group(group)


@on_world(3)
def test_groups_that_overlap_work_side_by_side() -> None:
    rank = dist.get_rank()
    groups = {(a, b): dist.new_group([a, b]) for a, b in ((0, 1), (1, 2), (0, 2))}
    works = []
    for members, group in groups.items():
        if rank in members:
            x = torch.full((1000,), float(rank))
            works.append((members, x, dist.all_reduce(x, group=group, async_op=True)))
    for members, x, work in reversed(works):
        assert work is not None
        work.wait()
        assert torch.equal(x, torch.full((1000,), float(sum(members))))


@on_world(2)
def test_a_group_of_one() -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    mine = groups[dist.get_rank()]
    assert total(mine) == dist.get_rank()
    dist.barrier(group=mine)
    out = torch.zeros(1)
    dist.all_gather_into_tensor(out, torch.ones(1), group=mine)
    assert out.item() == 1.0


@on_world(3)
def test_a_group_of_another_backend_beside_it() -> None:
    group = dist.new_group(backend="gloo")
    assert dist.get_backend(group) == "gloo"
    assert total(group) == total() == 3.0


@on_world(2)
def test_groups_by_local_synchronization() -> None:
    group = dist.new_group([0, 1], use_local_synchronization=True)
    assert total(group) == 1.0


@on_world(4)
def test_subgroups_by_enumeration() -> None:
    mine, groups = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert len(groups) == 2
    assert total(mine) == {0: 2.0, 1: 4.0}[dist.get_rank() % 2]


@on_world(4)
def test_subgroups_by_size() -> None:
    mine, _ = dist.new_subgroups(2)
    assert total(mine) == {0: 1.0, 1: 5.0}[dist.get_rank() // 2]


@on_ranks(2)
def test_destroyed_and_made_again() -> None:
    for round_ in range(3):
        with world():
            assert total() == 1.0
            group = dist.new_group([0, 1])
            assert total(group) == 1.0
            if round_ == 1:
                dist.destroy_process_group(group)
                # torch 2.4 has a TypeError.
                with pytest.raises((ValueError, TypeError), match="not initialized|[Ii]nvalid process group|Invariant"):
                    dist.get_backend(group)


@on_world(3)
def test_monitored_barrier() -> None:
    for wait_all in (False, True):
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=wait_all)
    assert total() == 3.0


@on_world(3, fresh=True)
def test_monitored_barrier_names_the_rank_that_stays_away() -> None:
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)  # something else
    elif dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Rr]anks? \[?1\]? "):
            dist.monitored_barrier(timeout=timedelta(seconds=1))
    else:
        with pytest.raises(RuntimeError, match="monitored_?[bB]arrier"):
            dist.monitored_barrier(timeout=timedelta(seconds=2))


@on_world(4)
def test_a_group_is_split() -> None:
    """Without torch.distributed.split_group, which torch has for groups on accelerators alone."""
    everyone: Any = dist.group.WORLD
    rank = dist.get_rank()
    assert everyone.supports_splitting
    part = everyone.split_group([[0, 2], [1, 3]][rank % 2])
    assert (part.rank(), part.size()) == (rank // 2, 2)
    x = torch.tensor([float(rank)])
    part.allreduce([x]).wait()
    assert x.item() == {0: 2.0, 1: 4.0}[rank % 2]
    nothing = everyone.split_group([0])
    assert (nothing is None) == (rank != 0)


@on_world(2)
def test_barrier_of_one_device() -> None:
    dist.barrier()
    work = dist.barrier(async_op=True)
    assert work is not None
    work.wait()
