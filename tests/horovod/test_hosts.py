"""Ranks on several hosts, which are invented: everything goes over torch.distributed, or partly."""

from __future__ import annotations

import time

import pytest
import torch

import pycomm.horovod as hvd
from tests.horovod.training import assert_equal_models, reference, sgd, trained
from tests.horovod.worlds import values_of
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks


@on_ranks(2)
def test_two_hosts_of_one_rank() -> None:
    use_everything("ab")


@on_ranks(3)
def test_a_host_of_two_ranks_and_one_of_one() -> None:
    use_everything("aab")


def use_everything(hosts: str) -> None:
    """Run operations of every kind, and train."""
    with on_hosts(hosts):
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        order = list(range(12))
        handles = {}
        for i in order if rank % 2 else reversed(order):
            handles[i] = hvd.allreduce_async(torch.full((i + 1,), float(i)), name=f"n{i}", op=hvd.Sum)
        for i in order:
            assert hvd.synchronize(handles[i]).unique().tolist() == [i * size]
        gathered = hvd.allgather(values_of(rank, (rank, 2)))
        assert torch.equal(gathered, torch.cat([values_of(r, (r, 2)) for r in range(size)]))
        assert hvd.broadcast_object({"root": rank}, root_rank=1) == {"root": 1}
        output, received = hvd.alltoall(torch.full((size,), float(rank)), [1] * size)
        assert output.tolist() == [float(r) for r in range(size)]
        assert received.tolist() == [1] * size
        rows = hvd.reducescatter(torch.ones(size + 1, 2), op=hvd.Sum)
        assert rows.tolist() == [[size] * 2] * (2 if rank == 0 else 1)
        with pytest.raises(hvd.HorovodInternalError, match="disagree"):
            hvd.allreduce(torch.ones(2 + rank))
        assert_equal_models(trained(sgd, steps=2), reference(sgd, size, steps=2), 1e-9)
        hvd.barrier()
        hvd.shutdown()


@on_ranks(2)
def test_a_rank_that_shuts_down() -> None:
    with on_hosts("ab"):
        hvd.init()
        hvd.barrier()
        start = time.monotonic()
        if hvd.rank() == 0:
            with pytest.raises(hvd.HorovodInternalError):
                hvd.allreduce(torch.ones(2), name="alone")
        else:
            time.sleep(0.3)
        hvd.shutdown()
        assert time.monotonic() - start < 40


@on_ranks(2)
def test_shutdown_while_this_rank_waits_in_vain() -> None:
    with on_hosts("ab"):
        hvd.init()
        hvd.barrier()
        start = time.monotonic()
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(2), name="alone")
            time.sleep(0.3)
            assert not hvd.poll(handle)
            hvd.shutdown()
            assert time.monotonic() - start < 40
        else:
            time.sleep(1.0)
            hvd.shutdown()
