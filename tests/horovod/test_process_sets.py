"""Process sets: operations among some of the ranks, while others do something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pycomm.horovod as hvd
from tests.horovod.worlds import horovod
from tests.on_ranks import on_ranks


@on_ranks(3)
def test_operations_of_a_set() -> None:
    with horovod():
        some = hvd.add_process_set([2, 0])
        alone = hvd.add_process_set(hvd.ProcessSet([1]))
        rank = hvd.rank()
        assert (some.ranks, some.size(), alone.size()) == ([0, 2], 2, 1)
        assert some.included() == (rank != 1)
        if rank != 1:
            assert some.rank() == (0 if rank == 0 else 1)
            x = torch.full((4,), float(rank + 1))
            assert hvd.allreduce(x, op=hvd.Sum, process_set=some).tolist() == [4.0] * 4
            assert hvd.allreduce_(x.clone(), process_set=some).tolist() == [2.0] * 4
            assert hvd.allgather(x[:1], process_set=some).tolist() == [1.0, 3.0]
            assert hvd.broadcast(x, 2, process_set=some).tolist() == [3.0] * 4
            assert hvd.alltoall(x, process_set=some).tolist() == [1.0, 1.0, 3.0, 3.0]
            assert hvd.reducescatter(x, op=hvd.Sum, process_set=some).tolist() == [4.0, 4.0]
            assert hvd.grouped_allreduce([x], op=hvd.Max, process_set=some)[0].tolist() == [3.0] * 4
            assert hvd.broadcast_object({"from": rank}, 2, process_set=some) == {"from": 2}
            assert hvd.allgather_object(rank, process_set=some) == [0, 2]
            hvd.barrier(process_set=some)
            y = torch.ones(2, requires_grad=True)
            (hvd.allreduce(y, process_set=some) * (rank + 1)).sum().backward()
            assert y.grad is not None
            assert y.grad.tolist() == [2.0, 2.0]
            with pytest.raises(ValueError, match=r"root_rank is 1, wanted one of the ranks \[0, 2\]"):
                hvd.broadcast(x, 1, process_set=some)
        else:
            assert hvd.allreduce(torch.ones(2), process_set=alone).tolist() == [1.0, 1.0]
            with pytest.raises(ValueError, match="without rank 1, which is this one"):
                hvd.allreduce(torch.ones(2), process_set=some)
            with pytest.raises(ValueError, match="without rank 1"):
                some.rank()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0
        assert hvd.remove_process_set(some)
        assert not hvd.remove_process_set(some)
        assert some.size() is None
        with pytest.raises(ValueError, match="not in use"):
            hvd.barrier(process_set=some)
        again = hvd.add_process_set([0, 2])
        assert again.process_set_id not in (None, 0, alone.process_set_id)


@on_ranks(2)
def test_sets_that_cannot_be() -> None:
    with horovod():
        wrong: list[tuple[Any, str]] = [
            ([0, 1], "and a set of these exists already"),
            ([0, 2], "rank 2, wanted ranks of 0 to 1"),
            ([0, 0], "wanted every rank once"),
            ([0.5], "wanted ranks, which are integers"),
            ([hvd.rank()], "the ranks disagree"),
        ]
        for ranks, message in wrong:
            with pytest.raises(ValueError, match=message):
                hvd.add_process_set(ranks)
        with pytest.raises(ValueError, match="mpi4py communicator"):
            hvd.ProcessSet(3)
        not_a_set: Any = 3
        with pytest.raises(TypeError, match="process_set is a int, wanted a ProcessSet"):
            hvd.barrier(process_set=not_a_set)
        assert not hvd.remove_process_set(hvd.global_process_set)
        nobody = hvd.add_process_set([])
        assert nobody.size() == 0
        assert not nobody.included()


@on_ranks(2)
def test_sets_given_to_init() -> None:
    mine, theirs = hvd.ProcessSet([0]), hvd.ProcessSet([1])
    assert mine.size() is None
    assert mine.included() is None
    hvd.init(process_sets=[mine, theirs])
    try:
        assert hvd.allreduce(torch.ones(1), process_set=[mine, theirs][hvd.rank()]).item() == 1.0
        with pytest.raises(ValueError, match="initialized already"):
            hvd.init(process_sets=[hvd.ProcessSet([0])])
        hvd.init()
        hvd.barrier()
    finally:
        hvd.shutdown()
    with pytest.raises(ValueError, match="process_sets is 'static', wanted a list"):
        hvd.init(process_sets="static")
    with pytest.raises(ValueError, match=r"process_sets\[1\].*exists already"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    assert not hvd.is_initialized()
    hvd.init(process_sets="dynamic")
    hvd.barrier()
    hvd.shutdown()
