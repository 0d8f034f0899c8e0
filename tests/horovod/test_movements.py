"""Allgather, broadcast and alltoall: every form and dtype, rows that differ, gradients."""

from __future__ import annotations

import pytest
import torch

from tests.horovod.worlds import grad_of, horovod, values_of
from tests.on_ranks import on_ranks

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
DTYPES += [torch.float32, torch.float64, torch.complex64]


@on_ranks(2, 3)
def test_allgather_of_rows_that_differ_in_number() -> None:
    with horovod() as hvd:
        for dtype in DTYPES:
            parts = [values_of(r, (2 * r, 3), dtype) for r in range(hvd.size())]  # none on rank 0
            wanted = torch.cat(parts)
            assert torch.equal(hvd.allgather(parts[hvd.rank()]), wanted)
            assert torch.equal(hvd.synchronize(hvd.allgather_async(parts[hvd.rank()], name="a")), wanted)
        both = [values_of(hvd.rank(), (hvd.rank() + 1, 2)), values_of(hvd.rank(), (3,), torch.int64)]
        gathered = hvd.grouped_allgather(both)
        assert torch.equal(gathered[0], torch.cat([values_of(r, (r + 1, 2)) for r in range(hvd.size())]))
        assert torch.equal(gathered[1], torch.cat([values_of(r, (3,), torch.int64) for r in range(hvd.size())]))
        assert len(hvd.synchronize(hvd.grouped_allgather_async(both, name="g"))) == 2


@on_ranks(2, 3)
def test_broadcast_from_every_rank() -> None:
    with horovod() as hvd:
        for root in range(hvd.size()):
            for dtype in DTYPES:
                x, wanted = values_of(hvd.rank(), dtype=dtype), values_of(root, dtype=dtype)
                before = x.clone()
                assert torch.equal(hvd.broadcast(x, root), wanted)
                assert torch.equal(hvd.synchronize(hvd.broadcast_async(x, root, name="b")), wanted)
                assert torch.equal(x, before)
                assert hvd.broadcast_(x, root) is x
                assert torch.equal(x, wanted)
                y = values_of(hvd.rank(), dtype=dtype)
                hvd.synchronize(hvd.broadcast_async_(y, root))
                assert torch.equal(y, wanted)
            z = values_of(hvd.rank(), (3, 4)).t()
            assert torch.equal(hvd.broadcast_(z, root), values_of(root, (3, 4)).t())


@on_ranks(2, 3)
def test_alltoall() -> None:
    with horovod() as hvd:
        rank, size = hvd.rank(), hvd.size()
        x = torch.arange(2 * size * 3).reshape(2 * size, 3) + 100 * rank
        wanted = torch.cat([torch.arange(6).reshape(2, 3) + 6 * rank + 100 * r for r in range(size)])
        assert torch.equal(hvd.alltoall(x), wanted)
        output, received = hvd.synchronize(hvd.alltoall_async(x, name="t"))
        assert torch.equal(output, wanted)
        assert received.tolist() == [2] * size
        splits = [rank + r for r in range(size)]  # nothing from rank 0 to itself
        x = torch.arange(sum(splits)).double() + 100 * rank
        for given in (splits, torch.tensor(splits, dtype=torch.int32), torch.tensor(splits)):
            output, received = hvd.alltoall(x, given)
            assert received.tolist() == [r + rank for r in range(size)]
            assert received.dtype == (given.dtype if isinstance(given, torch.Tensor) else torch.int32)
            starts = [sum(r + q for q in range(rank)) for r in range(size)]
            assert torch.equal(
                output, torch.cat([torch.arange(s, s + r + rank).double() + 100 * r for r, s in enumerate(starts)])
            )
        output, received = hvd.alltoall(torch.ones(size + 5), [1] * size)  # five rows stay
        assert len(output) == size


@on_ranks(2)
def test_gradients_of_movements() -> None:
    with horovod() as hvd:
        rank = hvd.rank()
        x = values_of(rank, (rank + 1, 2)).requires_grad_()
        weights = torch.arange(6.0).reshape(3, 2) * (rank + 1)
        (hvd.allgather(x) * weights).sum().backward()
        average = torch.arange(6.0).reshape(3, 2) * 1.5
        assert torch.equal(grad_of(x), average[:1] if rank == 0 else average[1:])
        xs = [values_of(rank, (rank + 1, 2)).requires_grad_(), torch.ones(1, requires_grad=True)]
        first, second = hvd.grouped_allgather(xs)
        ((first * weights).sum() + second.sum()).backward()
        assert torch.equal(grad_of(xs[0]), average[:1] if rank == 0 else average[1:])
        assert torch.equal(grad_of(xs[1]), torch.ones(1))
        for root in range(2):
            x = values_of(rank).requires_grad_()
            (hvd.broadcast(x, root) * (rank + 1)).sum().backward()
            assert torch.equal(grad_of(x), torch.full((5, 3), 1.5 if rank == root else 0.0))
        x = values_of(rank, (4, 2)).requires_grad_()
        (hvd.alltoall(x) * (rank + 1)).sum().backward()
        assert torch.equal(grad_of(x), torch.tensor([1.0, 1, 2, 2]).unsqueeze(1).expand(4, 2))
        x = values_of(rank, (4, 2)).requires_grad_()
        output, received = hvd.alltoall(x, [1, 2])
        assert not received.requires_grad
        (output * (rank + 1)).sum().backward()
        assert torch.equal(grad_of(x), torch.tensor([1.0, 2, 2, 0]).unsqueeze(1).expand(4, 2))


@on_ranks(2)
def test_sparse_tensors() -> None:
    with horovod() as hvd:
        rank = hvd.rank()
        dense = [torch.zeros(6, 2), torch.zeros(6, 2)]
        dense[0][[1, 4]] = 1.0
        dense[1][[4, 5, 0]] = 3.0
        handle = hvd.sparse_allreduce_async(dense[rank].to_sparse(1), name="s", op=hvd.Sum)
        assert torch.equal(handle().to_dense(), dense[0] + dense[1])
        handle = hvd.sparse_allreduce_async(dense[rank].to_sparse(), name=None, op=hvd.Average)
        assert torch.equal(hvd.synchronize(handle).to_dense(), (dense[0] + dense[1]) / 2)
        nothing = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.int64), torch.empty(0), (6, 2))
        mine = nothing if rank else dense[0].to_sparse()
        handle = hvd.sparse_allreduce_async(mine, name="n", op=hvd.Sum)
        assert torch.equal(handle().to_dense(), dense[0])
        with pytest.raises(ValueError, match="op is Max, wanted Sum or Average"):
            hvd.sparse_allreduce_async(mine, "m", hvd.Max)
        with pytest.raises(TypeError, match="wanted a sparse tensor"):
            hvd.sparse_allreduce_async(torch.ones(2), "m", hvd.Sum)
