"""Operations are matched by name: in any order, by some ranks later than others, and not at all."""

from __future__ import annotations

import random
import time

import pytest
import torch

from pycomm.horovod.engine import LONGEST_PAUSE
from pycomm.horovod.process_sets import world
from tests.horovod.worlds import horovod
from tests.on_ranks import on_ranks


@on_ranks(2, 3)
def test_another_order_on_every_rank() -> None:
    with horovod() as hvd:
        for number in range(6):  # the names are known from the second time on
            names = [f"tensor {i}" for i in range(40)]
            random.Random(hvd.rank() + 10 * number).shuffle(names)
            handles = {}
            for name in names:
                i = int(name.split()[1])
                if i % 4 == 0:
                    handles[name] = hvd.allgather_async(torch.full((1, i + 1), float(hvd.rank())), name)
                elif i % 4 == 1:
                    handles[name] = hvd.broadcast_async(torch.full((i + 1,), float(hvd.rank())), i % hvd.size(), name)
                else:
                    handles[name] = hvd.allreduce_async(torch.full((i + 1,), float(i)), name=name, op=hvd.Sum)
            random.Random(hvd.rank() + 1).shuffle(names)
            for name in names:
                i, result = int(name.split()[1]), hvd.synchronize(handles[name])
                if i % 4 == 0:
                    assert result[:, 0].tolist() == list(range(hvd.size()))
                else:
                    assert result.unique().tolist() == [i % hvd.size() if i % 4 == 1 else i * hvd.size()]


@on_ranks(2)
def test_ranks_that_wait_for_different_operations() -> None:
    with horovod() as hvd:
        mine, other = ("a", "b") if hvd.rank() == 0 else ("b", "a")
        first = hvd.allreduce_async(torch.ones(2 if mine == "a" else 3), name=mine, op=hvd.Sum)
        engine = world().sets[0].engine
        assert engine is not None
        # Rounds get rare, as nobody has news, until the other one goes on.
        while engine.pause < LONGEST_PAUSE and not hvd.poll(first):
            time.sleep(0.01)
        second = hvd.allreduce_async(torch.ones(2 if other == "a" else 3), name=other, op=hvd.Sum)
        assert hvd.synchronize(second).unique().tolist() == [2.0]
        assert hvd.synchronize(first).unique().tolist() == [2.0]


@on_ranks(2)
def test_a_synchronous_operation_while_another_is_outstanding() -> None:
    with horovod() as hvd:
        if hvd.rank() == 0:
            early = hvd.allreduce_async(torch.ones(2), name="early")
        for i in range(5):
            assert hvd.allreduce(torch.tensor([1.0]), name=f"x{i}", op=hvd.Sum).item() == 2.0
        if hvd.rank() == 1:
            early = hvd.allreduce_async(torch.ones(2), name="early")
        assert hvd.synchronize(early).tolist() == [1.0, 1.0]
        assert hvd.synchronize(early) is None, "its result has been taken"
        with pytest.raises(ValueError, match="wanted one whose result has not been taken"):
            hvd.poll(early)


@on_ranks(2)
def test_duplicate_names() -> None:
    with horovod() as hvd:
        for begin in (
            lambda: hvd.allreduce_async(torch.ones(2), name="d"),
            lambda: hvd.allgather_async(torch.ones(2), name="d"),  # names of other kinds are others
            lambda: hvd.broadcast_async(torch.ones(2), 0, name="d"),
            lambda: hvd.alltoall_async(torch.ones(2), name="d"),
            lambda: hvd.reducescatter_async(torch.ones(2), name="d"),
        ):
            for rank in range(2):
                if hvd.rank() == rank:
                    handle = begin()
                    if rank == 0:
                        with pytest.raises(ValueError, match=r"named '\w+.d' is not done yet"):
                            begin()
                hvd.barrier()
            hvd.synchronize(handle)


@on_ranks(2)
def test_ranks_that_disagree_go_on() -> None:
    with horovod() as hvd:
        r = hvd.rank()
        mistakes = [
            (lambda: hvd.allreduce(torch.ones(2 + r)), r"float32\[3\]' on rank 1, .*float32\[2\]' on rank 0"),
            (
                lambda: hvd.allreduce(torch.ones(2, 6 - 3 * r).reshape(-1)[:6].reshape((2, 3) if r else (6,))),
                "disagree",
            ),
            (lambda: hvd.allreduce(torch.ones(2).to(torch.int32 if r else torch.float32)), "int32.*float32"),
            (lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if r else hvd.Max), "op=sum.*op=max"),
            (lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + r), "prescale_factor=2.0"),
            (lambda: hvd.grouped_allreduce([torch.ones(2)] * (r + 1)), "disagree"),
            (lambda: hvd.allgather(torch.ones(2, 2 + r)), r"\[\*,3\]"),
            (lambda: hvd.allgather(torch.ones(2).to(torch.int32 if r else torch.float32)), "int32"),
            (lambda: hvd.broadcast(torch.ones(2 + r), 0), "disagree"),
            (lambda: hvd.broadcast(torch.ones(2), r), "root=1.*root=0"),
            (lambda: hvd.alltoall(torch.ones(2, 2 + r)), "disagree"),
            (lambda: hvd.reducescatter(torch.ones(2, 2 + r)), "disagree"),
        ]
        for mistake, message in mistakes:
            with pytest.raises(RuntimeError, match=message) as caught:
                mistake()
            assert isinstance(caught.value, ValueError)
            assert isinstance(caught.value, hvd.HorovodInternalError)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0, "the ranks do not go on"


@on_ranks(2)
def test_a_mistake_on_one_rank_is_told_to_the_other() -> None:
    with horovod() as hvd:
        wrong, x = hvd.rank() == 1, torch.ones(4, 2)
        mistakes = [
            (lambda: hvd.allreduce("x" if wrong else x, name="n"), TypeError, "tensor is a str, wanted a torch.Tensor"),
            (lambda: hvd.allreduce(x.to_sparse() if wrong else x), TypeError, "sparse_allreduce_async"),
            (lambda: hvd.allreduce(x, prescale_factor="2" if wrong else 2.0), TypeError, "prescale_factor is '2'"),
            (lambda: hvd.grouped_allreduce([] if wrong else [x]), ValueError, "tensors is empty"),
            (lambda: hvd.allgather(torch.tensor(1.0) if wrong else x), ValueError, "tensor has no dimensions"),
            (lambda: hvd.broadcast(x, 2 if wrong else 0), ValueError, "root_rank is 2, wanted one of the ranks"),
            (lambda: hvd.alltoall(x, [4, 1] if wrong else [2, 2]), ValueError, "5 rows in all, and tensor has 4"),
            (lambda: hvd.alltoall(x, [1, 1, 2] if wrong else [2, 2]), ValueError, "2 numbers of rows"),
            (lambda: hvd.alltoall(x, [0.5, 1] if wrong else [2, 2]), ValueError, "wanted integers"),
            (lambda: hvd.alltoall(x[:3] if wrong else x), ValueError, "3 rows, wanted a multiple of 2"),
            (lambda: hvd.reducescatter(x, op=hvd.Adasum if wrong else hvd.Sum), ValueError, "op is Adasum"),
        ]
        for mistake, kind, message in mistakes:
            with pytest.raises(kind if wrong else hvd.InvalidRequestError, match=message) as caught:
                mistake()
            assert wrong or "rank 1 cannot take part" in str(caught.value)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
        hvd.barrier()


@on_ranks(2)
def test_arguments_that_no_rank_gets_right() -> None:
    with horovod() as hvd:
        with pytest.raises(ValueError, match="op is 9, wanted one of hvd.Average"):
            hvd.allreduce(torch.ones(2), op=9)
        with pytest.raises(ValueError, match="op and average are both given"):
            hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)
        with pytest.raises(TypeError, match="name is 3, wanted a string"):
            hvd.allreduce(torch.ones(2), name=3)
        with pytest.raises(TypeError, match="op=Average is not defined"):
            hvd.allreduce(torch.ones(2).bool())
        with pytest.raises(TypeError, match="root_rank is '0'"):
            hvd.broadcast(torch.ones(2), "0")
        with pytest.raises(TypeError, match="device is 'cpu'"):
            hvd.join("cpu")


@on_ranks(2)
def test_more_names_than_are_kept() -> None:
    with horovod() as hvd:
        for turn in range(3):
            order = list(range(4500))
            random.Random(10 * turn + hvd.rank()).shuffle(order)
            handles = {i: hvd.allreduce_async(torch.full((1,), float(i)), name=f"p{i}") for i in order}
            assert all(hvd.synchronize(handle).item() == i for i, handle in handles.items())


@on_ranks(2, 3)
def test_join() -> None:
    with horovod() as hvd:
        rank, size = hvd.rank(), hvd.size()
        for first in range(size):
            x = torch.arange(6.0) * 6
            if rank == first:
                last = hvd.join()
            else:
                handles = [hvd.allreduce_async(x, name="a"), hvd.allreduce_async(x[:2].int(), name="b")]
                handles.append(hvd.grouped_allreduce_async([x, x[:1]], op=hvd.Sum))
                assert torch.equal(hvd.synchronize(handles[0]), x * (size - 1) / size)
                assert torch.equal(hvd.synchronize(handles[1]), (x[:2].int() * (size - 1)) // size)
                assert torch.equal(hvd.synchronize(handles[2])[1], x[:1] * (size - 1))
                with pytest.raises(hvd.HorovodInternalError, match=f"rank {first} has called join"):
                    hvd.allgather(x)
                with pytest.raises(hvd.HorovodInternalError, match=r"has called join\(\)"):
                    hvd.broadcast(x, 0, name="c")
                with pytest.raises(hvd.HorovodInternalError, match=r"has called join\(\)"):
                    hvd.allreduce(x, op=hvd.Max)
                last = hvd.join()
            assert last != first
            assert hvd.allgather_object(last) == [last] * size
