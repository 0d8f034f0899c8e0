"""NCCL on a real GPU: with one rank, and with two ranks on one GPU where NCCL can."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.collectives.transport.nccl import nccl_version, why_not_registered
from tests.kernels.gpus import requires_cuda
from tests.on_ranks import Pools
from tests.ranks import RankPool

pytestmark = requires_cuda


def version() -> tuple[int, ...]:
    found = nccl_version()
    return () if found is None else tuple(int(part) for part in found[0].split(".")[:2])


requires_nccl = pytest.mark.skipif(version() == (), reason="needs NCCL")


@pytest.fixture
def alone(one_rank_group: None) -> Iterator[pycomm.Communicator]:
    """A communicator of one rank."""
    with pycomm.Communicator(timeout=60) as communicator:
        yield communicator


@pytest.fixture
def sharing(new_ranks: Pools, monkeypatch: pytest.MonkeyPatch) -> RankPool:
    """Two ranks on one GPU, which NCCL before 2.30 has to take for two hosts."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    pool = new_ranks(2)
    if version() < (2, 30):
        pool.run(name_host)
    return pool


def name_host() -> None:
    os.environ["NCCL_HOSTID"] = str(dist.get_rank())


@requires_nccl
def test_one_rank(alone: pycomm.Communicator) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32):
        x = torch.arange(1000, device="cuda").to(dtype)
        wanted = x.clone()
        for op in ("sum", "max", "min"):
            alone.all_reduce(x, op)
        alone.all_reduce(x, "sum", algorithm="ring")
        out = torch.empty_like(x)
        alone.all_gather(out, x)
        alone.reduce_scatter(x, out)
        alone.broadcast(x, 0)
        alone.reduce(x, 0)
        with alone.group(0):
            alone.send(x, 0)
            alone.recv(out, 0)
        assert torch.equal(out, wanted)
    alone.check()


@requires_nccl
def test_order_on_streams(alone: pycomm.Communicator) -> None:
    """A long producer, then the collective, then a consumer, with no wait by anybody in between."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(10_000_000, device="cuda")
        for _ in range(50):
            x += 1
        work = alone.all_reduce(x, "mean", async_op=True)
        assert work is not None
        work.wait()
        y = x * 2
    side.synchronize()
    assert bool((y == 100).all())


@requires_nccl
def test_registered_memory(alone: pycomm.Communicator) -> None:
    """Also while its memory is given back and taken again."""
    for round in range(3):
        x = alone.empty(1 << 20, torch.float32, "cuda").fill_(round)
        alone.all_reduce(x, "mean")
        assert bool((x == round).all())
        assert alone.channel.registered_bytes == (0 if why_not_registered() else x.nbytes)
        del x
    alone.check()


@requires_nccl
def test_cupy(alone: pycomm.Communicator) -> None:
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.arange(1000, dtype=cupy.float32)
        alone.all_reduce(x, "mean")
        assert (x + 1)[999] == 1000


def sums_in_windows() -> None:
    """Also after one rank has dropped its memory before the other."""
    rank = dist.get_rank()
    with pycomm.Communicator(timeout=60) as c:
        kept = []
        for round in range(3):
            x = c.empty(1 << 20, torch.bfloat16, "cuda", symmetric=True).fill_(rank + round)
            for _ in range(2):
                c.all_reduce(x)
            assert bool((x == 2 * (1 + 2 * round)).all())
            assert c.channel.symmetric_bytes >= (0 if why_not_registered(symmetric=True) else x.nbytes)
            kept += [x] * (rank == round)
            del x
        c.check()


@requires_nccl
def test_windows_of_two_ranks(sharing: RankPool) -> None:
    sharing.run(sums_in_windows)


def collectives() -> None:
    rank = dist.get_rank()
    with pycomm.Communicator(timeout=60) as c:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
            mine = torch.arange(10, device="cuda").to(dtype) + rank
            other = torch.arange(10, device="cuda").to(dtype) + (1 - rank)
            for algorithm in ("native", "ring", "halving_doubling", "direct", "double_tree(2)"):
                x = mine.clone()
                c.all_reduce(x, algorithm=algorithm)
                assert torch.equal(x, mine + other)
            out = torch.empty(20, dtype=dtype, device="cuda")
            c.all_gather(out, mine)
            assert torch.equal(out, torch.cat([mine, other] if rank == 0 else [other, mine]))
            part = torch.empty(5, dtype=dtype, device="cuda")
            c.reduce_scatter(part, mine)
            assert torch.equal(part, (mine + other)[5 * rank : 5 * rank + 5])
            x = mine.clone()
            c.broadcast(x, 1)
            assert torch.equal(x, other if rank == 0 else mine)
            with c.group(0):
                c.send(mine, 1 - rank)
                c.recv(x, 1 - rank)
            assert torch.equal(x, other)
        x = torch.full((1000,), float(rank), device="cuda")
        c.all_reduce(x, "mean")
        assert bool((x == 0.5).all())
        half = torch.full((1000,), 60000.0 * rank, dtype=torch.float16, device="cuda")
        c.all_reduce(half, "mean", algorithm="circulant")
        assert bool((half == 30000).all())


@requires_nccl
def test_two_ranks(sharing: RankPool) -> None:
    sharing.run(collectives)


def one_does_not_come() -> str:
    with pycomm.Communicator(timeout=5) as c:
        x = torch.ones(1000, device="cuda")
        c.all_reduce(x)
        torch.cuda.synchronize()
        if dist.get_rank() == 1:
            c.barrier()
            return ""
        c.all_reduce(x)
        torch.cuda.synchronize()  # ends when the watchdog aborts
        with pytest.raises(pycomm.CommError) as caught:
            c.check()
        c.barrier()
        return str(caught.value)


@requires_nccl
def test_a_rank_that_does_not_come(sharing: RankPool) -> None:
    texts: list[Any] = sharing.run(one_does_not_come)
    assert "all_reduce" in texts[0]
