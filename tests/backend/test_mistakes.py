"""Mistakes with ``init_process_group("pycomm")`` are errors that name them, within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

import pycomm._native as _native
from pycomm import torch_internals
from tests.backend.groups import pycomm_group
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


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    '"gloo" on one rank, "pycomm" on the others',
    "`ValueError` on the others; that rank waits for its timeout.",
)
@on_ranks(3, fresh=True)
def test_another_backend_on_one_rank() -> None:
    stranger = 1
    if dist.get_rank() == stranger:
        with pytest.raises(RuntimeError, match="timeout"):  # torch's own words
            join("gloo", "mixed", 4.0)
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
    info = _native.build_info()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(_native, "build_info", lambda: {**info, "version": "0.0.9"})
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


CALLS: dict[str, Callable[[int], Any]] = {
    "sizes": lambda rank: dist.all_reduce(torch.zeros(3 + rank)),
    "dtypes": lambda rank: dist.all_reduce(torch.zeros(3, dtype=(torch.float32, torch.float64)[rank])),
    "reductions": lambda rank: dist.all_reduce(torch.zeros(3), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank]),
    "operations": lambda rank: (dist.all_reduce, lambda x: dist.broadcast(x, 0))[rank](torch.zeros(3)),
    "roots": lambda rank: dist.broadcast(torch.zeros(3), rank),
}


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "call different operations, sizes, dtypes or reductions",
    "`ValueError` everywhere with each rank's call; nothing is written.",
)
@pytest.mark.parametrize("what", CALLS)
@on_world(2)
def test_ranks_that_call_different_things(what: str) -> None:
    with pytest.raises(ValueError, match="the ranks disagree: rank 1 called .* where rank 0 called"):
        CALLS[what](dist.get_rank())
    x = torch.ones(3)
    dist.all_reduce(x)  # the group is of use still
    assert x.tolist() == [2.0] * 3


WRONG: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "reduction": (
        lambda peer: dist.all_reduce(torch.zeros(3), _make_nccl_premul_sum(2.0)),
        ValueError,
        "op is PREMUL_SUM, wanted SUM, AVG",
    ),
    "device": (lambda peer: dist.all_reduce(torch.zeros(3, device="meta")), RuntimeError, "on meta, wanted the CPU"),
    "tag": (lambda peer: dist.send(torch.zeros(3), peer, tag=-1), ValueError, "tag is -1, wanted 0 <= tag <"),
    "splits": (
        lambda peer: dist.all_to_all_single(torch.zeros(4), torch.zeros(5), [2, 2], [2, 2]),
        ValueError,
        r"input has 5 rows, and input split sizes are \[2, 2\] for 2 ranks",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@on_world(2)
def test_wrong_arguments(what: str) -> None:
    call, kind, says = WRONG[what]
    with pytest.raises(kind, match=says):
        call(1 - dist.get_rank())
    dist.barrier()


@pytest.mark.behavior(
    "Collectives, messages and pipelines", "receive a message into another size", "`ValueError` on the receiver."
)
@on_world(2)
def test_a_message_of_another_size() -> None:
    if dist.get_rank() == 1:
        dist.send(torch.zeros(5), 0)
    else:
        with pytest.raises(ValueError, match="x has 12 bytes .* the message from rank 1 with tag 0 has 20 bytes"):
            dist.recv(torch.zeros(3), 1)
    dist.barrier()


@on_ranks(2)
def test_a_message_that_never_fits() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYCOMM_BUFFER_BYTES", "1000000")
        with pycomm_group() as group:
            with pytest.raises(ValueError, match="fits into the 1000000 bytes .*PYCOMM_BUFFER_BYTES"):
                dist.send(torch.zeros(1_000_000), 1 - dist.get_rank(), group=group)
            dist.barrier(group=group)


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
