"""What torch asks of process groups written in Python: names, works, futures, the timeout, the end.

After torch's own tests of such groups and backends, which do not come with torch.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.collectives.backend import stats
from pycomm.torch_internals import PrefixStore, store_of
from tests.backend.worlds import on_world
from tests.on_ranks import on_ranks


def everyone() -> Any:
    return dist.group.WORLD


@on_world(2)
def test_names_and_places() -> None:
    group = everyone()
    assert isinstance(group, dist.ProcessGroup)
    assert group.name() == "pycomm"
    assert (group.rank(), group.size()) == (dist.get_rank(), dist.get_world_size())
    assert dist.get_backend() == "pycomm"
    assert dist.get_backend_config() == "cpu:pycomm" + (",cuda:pycomm" if torch.cuda.device_count() else "")
    group._set_group_desc("of a test")
    assert group.group_desc == "of a test"
    assert dist.new_group(group_desc="another").group_desc == "another"
    group.get_group_store().set(f"rank{dist.get_rank()}", "here")
    assert group.get_group_store().get(f"rank{1 - dist.get_rank()}") == b"here"


@on_ranks(2)
def test_a_group_that_torch_does_not_know() -> None:
    world: Any = everyone()
    store = PrefixStore("apart of a test", store_of(world))
    for number in range(2):
        group: Any = pycomm.backend.make_group(
            PrefixStore(str(number), store), world.rank(), world.size(), timedelta(seconds=30)
        )
        x = torch.ones(3) * (world.rank() + 1)
        group.allreduce([x]).wait()
        assert x.tolist() == [3.0] * 3
        assert (group.rank(), group.size(), group.name()) == (world.rank(), world.size(), "pycomm")
        group.shutdown()


@on_world(2)
def test_a_work_says_when_it_has_ended() -> None:
    x = torch.ones(5)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    work: Any = dist.all_reduce(x, async_op=True)
    if dist.get_rank() == 0:
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match="[Tt]imed out"):
            work.wait(timedelta(milliseconds=20))
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert torch.equal(work.result()[0], torch.full((5,), 2.0))


@on_world(2)
def test_a_future_has_the_tensors() -> None:
    x = torch.ones(5)
    work: Any = dist.all_reduce(x, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((5,), 4.0))
    assert work.get_future().done()
    assert work.get_future() is work.get_future()


@on_world(2)
def test_a_callback_may_wait_for_another_collective() -> None:
    """PowerSGD's does. It comes before collectives that were started later, on every rank."""
    x, y, z = torch.ones(5), torch.ones(5), torch.ones(5)

    def again(future: Any) -> torch.Tensor:
        work: Any = dist.all_reduce(y, async_op=True)
        dist.all_reduce(z)
        value: torch.Tensor = work.get_future().wait()[0]
        return value + future.value()[0] + z

    if dist.get_rank() == 0:
        time.sleep(0.1)
    work: Any = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(again)
    later = [torch.full((3,), float(i)) for i in range(5)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in later]
    dist.all_reduce(torch.ones(2))
    assert torch.equal(future.wait(), torch.full((5,), 6.0))
    for one in works:
        one.wait()
    assert [tensor[0].item() for tensor in later] == [0.0, 2.0, 4.0, 6.0, 8.0]


@on_world(2)
def test_many_works_are_waited_for_in_any_order() -> None:
    xs = [torch.full((4,), float(i)) for i in range(20)]
    works: list[Any] = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in reversed(works):
        work.wait()
    assert [x[0].item() for x in xs] == [2.0 * i for i in range(20)]


@on_world(2)
def test_single_tensor_forms_from_cpp() -> None:
    """Of these, functional collectives call the group's own methods, by the group's name."""
    name, rank = everyone().group_name, dist.get_rank()
    operations: Any = torch.ops._c10d_functional
    gathered = operations.wait_tensor(operations.all_gather_into_tensor(torch.full((2,), float(rank)), 2, name))
    assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]
    scattered = operations.wait_tensor(operations.reduce_scatter_tensor(torch.arange(4.0), "sum", 2, name))
    assert scattered.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]
    exchanged = operations.wait_tensor(
        operations.all_to_all_single(torch.arange(2.0) + 10 * rank, [1, 1], [1, 1], name)
    )
    assert exchanged.tolist() == [rank, rank + 10.0]
    x = torch.ones(3)
    operations.wait_tensor(operations.all_reduce_(x, "sum", name))
    assert x.tolist() == [2.0] * 3
    assert operations.wait_tensor(operations.broadcast(x * rank, 1, name)).tolist() == [2.0] * 3


@on_world(2)
def test_ddp_without_its_first_synchronization_sends_nothing() -> None:
    before = stats()
    DistributedDataParallel(nn.Linear(30, 30), init_sync=False)
    assert stats() == before


@on_world(2, fresh=True)
def test_a_new_timeout() -> None:
    everyone().set_timeout(timedelta(seconds=0.5))
    if dist.get_rank() == 1:
        time.sleep(2.0)
        return
    start = time.monotonic()
    with pytest.raises(pycomm.CommError, match=r"rank 0: all_reduce: timed out waiting for rank 1 .*timeout is 0\.5 s"):
        dist.all_reduce(torch.ones(2))
    assert time.monotonic() - start < 1.8


@on_world(2, fresh=True)
def test_a_timeout_of_one_operation() -> None:
    if dist.get_rank() == 1:
        time.sleep(2.0)
        return
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.3)
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        everyone().allreduce([torch.ones(2)], options).wait()


@on_world(2, fresh=True)
def test_aborted_here_fails_there() -> None:
    if dist.get_rank() == 1:
        time.sleep(0.3)
        everyone().abort()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(2))
        return
    with pytest.raises(pycomm.CommError, match="rank 1"):
        dist.all_reduce(torch.ones(2))


@on_world(2)
def test_under_detailed_debugging() -> None:
    debugging: Any = dist
    debugging.set_debug_level(debugging.DebugLevel.DETAIL)
    try:
        group = dist.new_group()
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2.0, 2.0]
    finally:
        debugging.set_debug_level(debugging.DebugLevel.OFF)
