"""Over torch.distributed every Communicator has a process group of its own."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pycomm import CommError, Communicator
from pycomm.collectives.transport import own_group as module
from pycomm.collectives.transport.torch_group import cpu_backend_of
from tests.on_ranks import on_ranks
from tests.ranks import RankPool


@on_ranks(3)
def test_groups_come_and_go() -> None:
    """Closed and made anew, by ranks that differ in how many groups they have: what new_group() cannot do."""
    rank = dist.get_rank()
    before = len(distributed_c10d._world.pg_map)
    pair = dist.new_group([0, 1])
    others = [dist.new_group([0, 2]) for _ in range(2)]  # rank 1 is in none of them
    for i in range(8):
        if rank < 2:
            with Communicator(pair, timeout=20, transport="torch") as c:
                x = torch.full((3,), float(rank + i))
                c.all_reduce(x)
                assert x.tolist() == [2.0 * i + 1] * 3
                time.sleep(0.01 * rank)
        with Communicator(timeout=20, transport="torch") as everyone:
            y = torch.ones(2)
            everyone.all_reduce(y)
            assert y.tolist() == [3.0, 3.0]
    for group in (pair, *others):
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    assert len(distributed_c10d._world.pg_map) == before


@on_ranks(2)
def test_they_do_not_disturb_each_other() -> None:
    """Two communicators and the user's own group, each from a thread, in an order of each rank's own."""
    rank = dist.get_rank()
    with Communicator(timeout=20, transport="torch") as a, Communicator(timeout=20, transport="torch") as b:
        for step in range(20):
            x, y, z = torch.ones(1000), torch.ones(10), torch.ones(100)
            first, second = ((a, x), (b, y)) if (rank + step) % 2 else ((b, y), (a, x))
            works: list[Any] = [c.all_reduce(t, async_op=True) for c, t in (first, second)]
            dist.all_reduce(z)
            for work in works:
                work.wait()
            assert x[0] == y[0] == z[0] == 2.0


@on_ranks(2)
def test_a_dropped_communicator_gives_its_group_back() -> None:
    before = len(distributed_c10d._world.pg_map), threading.active_count()
    c: Any = Communicator(timeout=20, transport="torch")
    work = c.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    del c, work
    assert (len(distributed_c10d._world.pg_map), threading.active_count()) == before


@on_ranks(2)
def test_an_error_that_is_kept_keeps_no_connection() -> None:
    """Another rank may wait at its end: for Gloo's timeout, were it open as long as somebody looks at the error."""
    c: Any = Communicator(timeout=20, transport="torch")
    own = weakref.ref(c.channel.transport._group.group)
    if dist.get_rank() == 1:
        c.close("it had enough")
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.3)  # Gloo has noticed, so that the operation fails where it begins
        with pytest.raises(CommError, match="torch.distributed: ") as kept:
            c.all_reduce(torch.ones(3))
        c.close()
        assert own() is None
        assert "Connection closed" in str(kept.value)
        assert kept.value.__context__ is None, "it quotes torch's error, which would be printed again"


@on_ranks(2)
def test_jobs_after_close_fail_at_once() -> None:
    for transport in ("torch", "shared_memory"):
        c = Communicator(timeout=20, transport=transport)
        c.all_reduce(torch.ones(3), async_op=True)
        c.barrier()
        c.close()
        work = c.channel.submit(lambda: 1)
        assert work.is_completed()
        with pytest.raises(RuntimeError, match="the communicator is closed"):
            work.wait()


def abandoned(transport: str) -> str:
    rank = dist.get_rank()
    c = Communicator(timeout=40, transport=transport)
    if rank == 0:
        c.channel.abandon("it has had enough", in_step=True)
        time.sleep(1.0)
        c.close()
        return ""
    started = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        c.all_reduce(torch.ones(3))
    assert time.monotonic() - started < 20
    c.close()
    return str(raised.value)


@pytest.mark.parametrize(("transport", "says"), [("torch", "rank 0 could not"), ("shared_memory", "has had enough")])
def test_who_abandons_says_so(two_ranks: RankPool, transport: str, says: str) -> None:
    assert says in two_ranks.run(abandoned, transport)[1]


@on_ranks(2)
def test_backends_that_lack_it() -> None:
    group = dist.group.WORLD
    assert group is not None
    assert cpu_backend_of(module.place_of(group)) == "gloo"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
        with pytest.raises(ValueError, match="process_group has no backend for CPU tensors, only cuda:nccl: call"):
            Communicator(timeout=20, transport="torch")
        patch.setattr(dist, "get_backend_config", lambda _: "cpu:mpi")
        patch.setattr(dist, "get_world_size", lambda: 3)
        with pytest.raises(ValueError, match="process_group is a sub-group over MPI, whose groups only all ranks"):
            Communicator(timeout=20, transport="torch")
