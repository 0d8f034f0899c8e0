"""Mistakes with ``init_process_group("pycomm")`` are errors that name them, within seconds."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycomm import torch_internals
from pycomm.transport import choice
from tests.backend.worlds import on_world
from tests.on_ranks import on_ranks


def join(backend: str, prefix: str, timeout: float, rank: int | None = None) -> None:
    """Make the default group anew, in the pool's store."""
    default = dist.group.WORLD
    assert default is not None
    join.store = getattr(join, "store", None) or torch_internals.store_of(default)  # type: ignore[attr-defined]
    rank, size = default.rank() if rank is None else rank, default.size()
    dist.destroy_process_group()
    store = torch_internals.PrefixStore(prefix, join.store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


@on_ranks(3, fresh=True)
def test_another_backend_on_one_rank() -> None:
    stranger = 1
    if dist.get_rank() == stranger:
        with pytest.raises(RuntimeError, match="timeout"):  # torch's own words
            join("gloo", "mixed", 6.0)
        return
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"'gloo' on rank {stranger}, 'pycomm' on rank") as caught:
        join("pycomm", "mixed", 60.0)
    assert "backend of the process group" in str(caught.value)
    assert time.monotonic() - start < 20.0


@on_ranks(2, fresh=True)
def test_a_group_on_gloo_before_it_in_the_same_store() -> None:
    """Its addresses are still there, of ranks that are only late."""
    join("gloo", "again", 30.0)
    if dist.get_rank() == 1:
        time.sleep(4.0)
    join("pycomm", "again", 30.0)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]


@on_ranks(2, fresh=True)
def test_another_version_of_pycomm_on_one_rank() -> None:
    info = dict(choice._native.build_info())
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(choice._native, "build_info", lambda: {**info, "version": "0.0.9"})
        with pytest.raises(ValueError, match=rf"rank 1 runs pycomm 0\.0\.9, rank 0 {info['version']}"):
            join("pycomm", "versions", 30.0)


@on_ranks(2)
def test_no_address_of_the_master() -> None:
    default = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MASTER_ADDR", raising=False)
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("MASTER_PORT", "1")
        patch.setattr(dist.distributed_c10d._world, "default_pg", None)
        with pytest.raises(ValueError, match="MASTER_ADDR"):
            dist.init_process_group("pycomm")
    assert dist.group.WORLD is default


@on_world(1)
def test_a_world_of_one() -> None:
    x: Any = torch.arange(5.0)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    outs = [torch.empty(5)]
    dist.all_gather(outs, x)
    assert torch.equal(outs[0], x)
    dist.barrier()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(400, 400))
    model(torch.ones(2, 400)).sum().backward()
    grad = model.module.bias.grad
    assert grad is not None
    assert grad.eq(2).all()
