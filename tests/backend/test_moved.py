"""Buckets of DistributedDataParallel in memory that all ranks of the host reach."""

from __future__ import annotations

import gc
import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm.collectives.backend
from pycomm.collectives.backend import moved
from tests.backend.groups import pycomm_group
from tests.on_ranks import on_ranks


def a_model(width: int = 300) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])


def mean_gradients(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Averages of plain autograd's gradients, by Gloo."""
    model(x).square().sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for grad in grads:
        dist.all_reduce(grad)
    return [grad / dist.get_world_size() for grad in grads]


@pytest.mark.parametrize("settings", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_buckets_are_moved_and_stay(settings: dict[str, Any]) -> None:
    """Through the rebuild of the buckets, with right gradients from the first step on."""
    rank = dist.get_rank()
    x = torch.randn(8, 300, generator=torch.Generator().manual_seed(rank))
    expected = mean_gradients(a_model(), x)
    with pycomm_group() as group:
        model = DistributedDataParallel(a_model(), process_group=group, bucket_cap_mb=1, **settings)
        for step in range(5):
            model.zero_grad()
            before = pycomm.collectives.backend.stats(group)
            model(x).square().sum().backward()
            for param, grad in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(param.grad, grad)
            after = pycomm.collectives.backend.stats(group)
            assert after["bytes_staged"] == before["bytes_staged"], f"step {step}"
            assert after["bytes_direct"] > before["bytes_direct"]
        buckets = after["storages_moved"]
        for _ in range(3):
            model(x).sum().backward()
        assert pycomm.collectives.backend.stats(group)["storages_moved"] == buckets


def reduce_in_backward(bucket: torch.Tensor, group: Any) -> None:
    """All-reduce ``bucket`` as DistributedDataParallel does: inside a backward pass."""

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(bucket, group=group)
            return grad

    Reduce.apply(torch.ones(1, requires_grad=True)).sum().backward()


@on_ranks(2)
def test_views_move_along_and_memory_returns() -> None:
    rank = dist.get_rank()
    with pycomm_group() as group:
        backend: Any = group._get_backend(torch.device("cpu"))
        for turn in range(4):
            x = torch.full((100_000,), rank + 1.0)
            views = list(x.split(25_000))
            for step in range(4):
                reduce_in_backward(x, group)
                assert torch.cat(views).eq(3.0 * 2**step).all()
            reduce_in_backward(views[1], group)
            assert views[0].eq(24).all()
            assert x[25_000:50_000].eq(48).all()
            views[3].fill_(7.0)
            assert x[-1] == 7.0
            del x, views
            gc.collect()  # the class inside the helper is a cycle
            assert pycomm.collectives.backend.stats(group)["storages_moved"] == turn + 1
            assert len(backend.engine._moved._moved) == 1


@on_ranks(2)
def test_what_is_no_bucket_stays() -> None:
    """It may be resized, which torch cannot do to a storage that was moved."""
    with pycomm_group() as group:
        x = torch.ones(100_000)
        for step in range(3):
            dist.all_reduce(x, group=group)
            reduce_in_backward(x, group)
            assert x.eq(4.0 ** (step + 1)).all()
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(400_000)
        x.fill_(1.0)
        reduce_in_backward(x, group)
        assert x.eq(2).all()
        assert pycomm.collectives.backend.stats(group)["storages_moved"] == 0


@pytest.mark.behavior(
    "Collectives, messages and pipelines",
    "`buckets stay in private memory and are copied at each all-reduce: ...`",
    "`/dev/shm` has too little space. Start the container with a larger `--shm-size`.",
)
@on_ranks(2)
def test_too_little_shared_memory() -> None:
    """Copied instead, with one line in the log."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Kept()
    moved.log.addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch, pycomm_group() as group:
            real = os.statvfs("/dev/shm")
            small = os.statvfs_result((real.f_bsize, real.f_frsize, 16384, 10, 10, *tuple(real)[5:]))
            patch.setattr(os, "statvfs", lambda _: small)
            tensors = [torch.ones(100_000) for _ in range(2)]
            views = [x.split(10_000) for x in tensors]
            for step in range(3):
                for x in tensors:
                    reduce_in_backward(x, group)
                    assert x.eq(2.0 ** (step + 1)).all()
            counted = pycomm.collectives.backend.stats(group)
            assert counted["storages_moved"] == 0
            assert counted["bytes_staged"] == 6 * 400_000
            assert len(views) == 2
            assert len(lines) == 1
            assert "/dev/shm has 0 MiB left" in lines[0]
    finally:
        moved.log.removeHandler(handler)


@on_ranks(2)
def test_shared_by_the_user() -> None:
    """Memory that the user's own processes have mapped stays where it is."""
    with pycomm_group() as group:
        x = torch.ones(100_000).share_memory_()
        address, views = x.data_ptr(), x.split(10_000)
        for _ in range(3):
            reduce_in_backward(x, group)
        assert views[0].data_ptr() == address
        assert x.eq(8).all()
        assert pycomm.collectives.backend.stats(group)["storages_moved"] == 0


@on_ranks(2)
def test_sending_a_moved_tensor_elsewhere() -> None:
    """torch.multiprocessing would pass on a file that is no longer the tensor's memory: it fails instead."""
    with pycomm_group() as group:
        x = torch.ones(100_000)
        views = x.split(10_000)
        reduce_in_backward(x, group)
        assert pycomm.collectives.backend.stats(group)["storages_moved"] == 1
        assert views[0].eq(2).all()
        descriptor, size = x.untyped_storage()._share_fd_cpu_()
        storages: Any = torch.UntypedStorage
        with pytest.raises(RuntimeError, match="unable to"):
            storages._new_shared_fd_cpu(os.dup(descriptor), size)


@on_ranks(2)
def test_memory_of_the_group() -> None:
    """What FSDP2 asks for its buffers."""
    with pycomm_group() as group:
        backend: Any = group._get_backend(torch.device("cpu"))
        assert backend.supports_tensor_alloc(torch.device("cpu"))
        assert not backend.supports_tensor_alloc(torch.device("meta"))
        x = backend.allocate_tensor(100_000, dtype=torch.float32, device=torch.device("cpu")).fill_(1.0)
        whole = backend.allocate_tensor(200_000, dtype=torch.float32, device=torch.device("cpu"))
        dist.all_gather_into_tensor(whole, x, group=group)
        dist.reduce_scatter_tensor(x, whole, group=group)
        assert x.eq(2).all()
        assert pycomm.collectives.backend.stats(group)["bytes_staged"] == 0
        with pytest.raises(ValueError, match="wanted the CPU"):
            backend.allocate_tensor(1, device="meta")


@on_ranks(2)
def test_stats_of_other_groups() -> None:
    with pytest.raises(ValueError, match="wanted one with the backend 'pycomm'"):
        pycomm.collectives.backend.stats()
