"""Every operation of torch.distributed on CPU tensors over "pycomm", against what it must come to."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.groups import pycomm_group
from tests.backend.worlds import world
from tests.on_ranks import on_ranks

GLOOS = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def total(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(tensors)).sum(0)


SIZES = (0, 1, 7, 20_000, 300_000)  # with the announcement, reduced by all or in parts, staged


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, different on every rank and exact in every dtype."""
    return ((torch.arange(count) * 7 + rank * 3) % 5 + 1).to(dtype)


@on_ranks(2, 3)
def test_all_reduce() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    floating = {dist.ReduceOp.AVG: lambda x: x.double().mean(0)}
    anything = {
        dist.ReduceOp.SUM: lambda x: x.double().sum(0),
        dist.ReduceOp.MIN: lambda x: x.double().amin(0),
        dist.ReduceOp.MAX: lambda x: x.double().amax(0),
        dist.ReduceOp.PRODUCT: lambda x: x.double().prod(0),
    }
    with pycomm_group() as group:
        for dtype in GLOOS:
            for count in SIZES:
                everyone = torch.stack([values(p, count, dtype) for p in range(size)])
                for op, expected in {**anything, **(floating if dtype.is_floating_point else {})}.items():
                    x = values(rank, count, dtype)
                    dist.all_reduce(x, op, group=group)
                    assert x.dtype == dtype
                    torch.testing.assert_close(x, expected(everyone).to(dtype), msg=f"{dtype} {count} {op}")


@on_ranks(3)
def test_bits() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pycomm_group() as group:
        for dtype in (torch.int64, torch.uint8):
            parts = [values(p, 20_001, dtype) for p in range(size)]
            for op, one in (
                (dist.ReduceOp.BAND, torch.bitwise_and),
                (dist.ReduceOp.BOR, torch.bitwise_or),
                (dist.ReduceOp.BXOR, torch.bitwise_xor),
            ):
                x = parts[rank].clone()
                dist.all_reduce(x, op, group=group)
                assert torch.equal(x, one(one(parts[0], parts[1]), parts[2]))


@on_ranks(2)
def test_bool_and_complex() -> None:
    rank = dist.get_rank()
    with pycomm_group() as group:
        for op, expected in (
            (dist.ReduceOp.SUM, [False, True, True, True]),
            (dist.ReduceOp.PRODUCT, [False, False, False, True]),
            (dist.ReduceOp.MIN, [False, False, False, True]),
            (dist.ReduceOp.MAX, [False, True, True, True]),
            (dist.ReduceOp.BXOR, [False, True, True, False]),
        ):
            x = torch.tensor([[False, False, True, True], [False, True, False, True]][rank])
            dist.all_reduce(x, op, group=group)
            assert x.tolist() == expected
            assert x.view(torch.uint8).max() == 1
        z = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        dist.all_reduce(z, group=group)
        assert z.tolist() == [3 + 6j, 9 - 3j]
        y = torch.tensor([1 + 2j]) * (rank + 1)
        dist.broadcast(y, 1, group=group)
        assert y.item() == 2 + 4j


@on_ranks(2)
def test_gaps_views_and_graphs() -> None:
    """Tensors that are not contiguous, views, and leaves that want gradients."""
    rank = dist.get_rank()
    with pycomm_group() as group:
        whole = torch.zeros(6, 4)
        whole[:, 1] = rank + 1
        dist.all_reduce(whole[:, 1], group=group)
        assert whole[:, 1].tolist() == [3.0] * 6
        assert whole.sum() == 18
        image = torch.full((2, 3, 4, 5), float(rank)).to(memory_format=torch.channels_last)
        dist.broadcast(image, 1, group=group)
        assert image.eq(1).all()
        assert image.is_contiguous(memory_format=torch.channels_last)
        leaf = torch.full((3,), float(rank), requires_grad=True)
        dist.all_reduce(leaf, group=group)
        assert leaf.tolist() == [1.0] * 3
        outs = [torch.zeros(4, 6)[:, ::2] for _ in range(2)]
        dist.all_gather(outs, whole.t()[:, :3], group=group)
        assert all(torch.equal(out, whole.t()[:, :3]) for out in outs)
        turned = torch.zeros(4, 3).t()
        if rank == 0:
            dist.send(whole[:3], 1, group=group)
        else:
            dist.recv(turned, 0, group=group)
            assert torch.equal(turned, whole[:3])


@on_ranks(2, 4)
def test_to_and_from_one_rank() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pycomm_group() as group:
        for count in SIZES:
            for root in range(size):
                x = values(rank, count, torch.float32)
                dist.reduce(x, root, group=group)
                sums = total(values(p, count, torch.float32) for p in range(size))
                assert torch.equal(x, sums if rank == root else values(rank, count, torch.float32))
                x = values(rank, count, torch.int32)
                dist.broadcast(x, root, group=group)
                assert torch.equal(x, values(root, count, torch.int32))
                outs = [torch.zeros(count) for _ in range(size)]
                dist.gather(values(rank, count, torch.float32), outs if rank == root else None, root, group=group)
                for p, out in enumerate(outs):
                    assert torch.equal(out, values(p, count, torch.float32) if rank == root else torch.zeros(count))
                parts = [values(p + root, count, torch.int64) for p in range(size)]
                mine = torch.zeros(count, dtype=torch.int64)
                dist.scatter(mine, parts if rank == root else None, root, group=group)
                assert torch.equal(mine, values(rank + root, count, torch.int64))


@on_ranks(2, 3)
def test_gathering_and_scattering() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pycomm_group() as group:
        for count in SIZES:
            x = values(rank, count, torch.bfloat16)
            expected = [values(p, count, torch.bfloat16) for p in range(size)]
            outs = [torch.zeros_like(x) for _ in range(size)]
            dist.all_gather(outs, x, group=group)
            assert all(map(torch.equal, outs, expected))
            whole = torch.zeros(size * count, dtype=torch.bfloat16)
            dist.all_gather_into_tensor(whole, x, group=group)
            assert torch.equal(whole, torch.cat(expected))
            parts = [values(p + rank, count, torch.float64) for p in range(size)]
            sums = total(values(rank + p, count, torch.float64) for p in range(size))
            out = torch.zeros(count, dtype=torch.float64)
            dist.reduce_scatter(out, parts, group=group)
            assert torch.equal(out, sums)
            out.zero_()
            dist.reduce_scatter_tensor(out, torch.cat(parts), group=group)
            assert torch.equal(out, sums)


@on_ranks(3)
def test_uneven_parts() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pycomm_group() as group:
        for scale in (1, 50_000):
            lengths = [p * scale for p in range(size)]  # the first is empty
            outs = [torch.zeros(n) for n in lengths]
            dist.all_gather(outs, values(rank, lengths[rank], torch.float32), group=group)
            assert all(torch.equal(out, values(p, lengths[p], torch.float32)) for p, out in enumerate(outs))
            out = torch.zeros(lengths[rank])
            dist.reduce_scatter(out, [torch.full((n,), float(rank)) for n in lengths], group=group)
            assert out.eq(3.0).all()
            given = [torch.full((rank + p,), float(10 * rank + p)) for p in range(size)]
            taken = [torch.zeros(rank + p) for p in range(size)]
            dist.all_to_all(taken, given, group=group)
            assert all(t.eq(10 * p + rank).all() for p, t in enumerate(taken))
            x = torch.cat([torch.full((p * scale, 2), float(10 * rank + p)) for p in range(size)])
            out = torch.zeros(size * rank * scale, 2)
            dist.all_to_all_single(out, x, [rank * scale] * size, [p * scale for p in range(size)], group=group)
            assert torch.equal(out, torch.cat([torch.full((rank * scale, 2), 10.0 * p + rank) for p in range(size)]))


@on_ranks(2)
def test_all_to_all_of_equal_parts() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pycomm_group() as group:
        for count in SIZES:
            x = torch.cat([values(10 * rank + p, count, torch.int16) for p in range(size)])
            out = torch.zeros_like(x)
            dist.all_to_all_single(out, x, group=group)
            assert torch.equal(out, torch.cat([values(10 * p + rank, count, torch.int16) for p in range(size)]))


@on_ranks(2)
def test_several_at_once() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with pycomm_group() as group:
        tensors = [values(rank, n, torch.float32) for n in (3, 0, 70_000)] + [values(rank, 5, torch.int64)]
        group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
        for x in tensors:
            assert torch.equal(x, total(values(p, len(x), x.dtype) for p in range(size)))
        xs = [values(rank, n, torch.float32) for n in (4, 9)]
        lists = [[torch.zeros(4), torch.zeros(9)] for _ in range(size)]
        dist.all_gather_coalesced(lists, xs, group=group)
        for p, outs in enumerate(lists):
            assert all(torch.equal(out, values(p, len(out), torch.float32)) for out in outs)
        manager: Any = dist.distributed_c10d._coalescing_manager
        halves = [torch.zeros(2), torch.zeros(3)]
        wholes = [torch.full((2 * size,), float(rank)), torch.full((3 * size,), 2.0 * rank)]
        with manager(group, async_ops=True) as pending:
            for out, x in zip(halves, wholes, strict=True):
                dist.reduce_scatter_tensor(out, x, group=group)
        pending.wait()
        assert [half.tolist() for half in halves] == [[1.0] * 2, [2.0] * 3]
        with manager(group):
            for out, x in zip(wholes, halves, strict=True):
                dist.all_gather_into_tensor(out, x * (rank + 1), group=group)
        assert wholes[0].tolist() == [1.0] * 2 + [2.0] * 2
        with manager(group):
            for x in wholes:
                dist.all_reduce(x, group=group)
        assert wholes[1].tolist() == [4.0] * 3 + [8.0] * 3


@on_ranks(3)
def test_sparse() -> None:
    rank = dist.get_rank()
    with pycomm_group() as group:
        x = torch.sparse_coo_tensor(torch.tensor([[0, rank + 1, 0]]), [1.0, 2.0, 3.0], (5,))
        dist.all_reduce(x, group=group)
        assert x.to_dense().tolist() == [12.0, 2.0, 2.0, 2.0, 0.0]
        rows = torch.sparse_coo_tensor(torch.tensor([[0, rank]]), torch.ones(2, 4), (3, 4))
        dist.all_reduce(rows, group=group)
        assert rows.to_dense()[:, 0].tolist() == [4.0, 1.0, 1.0]


@on_ranks(2)
def test_works_and_futures() -> None:
    rank = dist.get_rank()
    with pycomm_group() as group:
        for count in (5, 300_000):
            x = torch.full((count,), rank + 1.0)
            work = dist.all_reduce(x, group=group, async_op=True)
            assert work is not None
            future = work.get_future()
            seen = future.then(lambda f: f.value()[0][0].item())
            assert work.wait()
            assert x.eq(3).all()
            assert future.wait()[0].data_ptr() == x.data_ptr()
            assert seen.wait() == 3.0
            assert future.done()
        works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for _ in range(50)]
        for work in reversed(works):
            assert work is not None
            work.wait()
        dist.barrier(group=group)
        barrier = dist.barrier(group=group, async_op=True)
        assert barrier is not None
        barrier.wait()


@on_ranks(2)
def test_wrong_arguments() -> None:
    """Every rank gets an error that says what is wrong, and the group goes on."""
    rank = dist.get_rank()
    with pycomm_group() as group:
        with pytest.raises(ValueError, match="elements"):
            dist.all_reduce(torch.ones(3 + rank), group=group)
        with pytest.raises((TypeError, ValueError), match="float|dtype"):
            dist.all_reduce(torch.ones(3, dtype=torch.float32 if rank else torch.float64), group=group)
        with pytest.raises((TypeError, ValueError)):
            dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG, group=group)
        with pytest.raises(ValueError, match="bytes|elements"):
            dist.all_to_all([torch.ones(1 + rank) for _ in range(2)], [torch.ones(2)] * 2, group=group)
        with pytest.raises((TypeError, ValueError)):  # wrong on one rank only
            dist.all_reduce(torch.ones(3, dtype=torch.bool if rank else torch.float32), dist.ReduceOp.AVG, group=group)
        with pytest.raises(ValueError, match="wanted one for each of 2 ranks"):
            dist.all_gather([torch.ones(3) for _ in range(2 + rank)], torch.ones(3), group=group)
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("keeps", [False, True])
@on_ranks(2)
def test_works_stay_where_torch_does_not_keep_them(keeps: bool) -> None:
    """As torch 2.4, whose C++ finds no ``wait`` once the Python object is gone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pycomm.collectives.backend.calls.keeps_python_works", lambda: keeps)
        with world("pycomm"):
            work = weakref.ref(dist.all_reduce(torch.ones(3), async_op=True))
            dist.barrier()
            gc.collect()
            assert (work() is not None) != keeps
