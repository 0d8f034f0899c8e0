"""Allreduce and reducescatter: every form, dtype, reduction and factor, against sums of all ranks' values."""

from __future__ import annotations

import pytest
import torch

from pycomm.horovod.execution import combine
from tests.horovod.worlds import all_values, grad_of, horovod, values_of
from tests.on_ranks import on_ranks

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert torch.equal(got, wanted), (got, wanted)


@on_ranks(2, 3)
def test_every_dtype_and_reduction() -> None:
    with horovod() as hvd:
        for dtype in INTEGERS + FLOATS:
            x, everyones = values_of(hvd.rank(), dtype=dtype), all_values(hvd.size(), dtype=dtype)
            total = everyones.sum(0).to(dtype)
            same(hvd.allreduce(x, op=hvd.Sum), total)
            same(hvd.allreduce(x, op=hvd.Min), everyones.amin(0))
            same(hvd.allreduce(x, op=hvd.Max), everyones.amax(0))
            same(hvd.allreduce(x, op=hvd.Product), everyones.to(torch.float64).prod(0).to(torch.int64).to(dtype))
            if dtype in INTEGERS:
                same(hvd.allreduce(x), total.div(hvd.size(), rounding_mode="trunc"))
            else:
                wide = everyones.double().mean(0)
                assert torch.allclose(hvd.allreduce(x).double(), wide, rtol=2e-2 if x.itemsize == 2 else 1e-6)
        flags = torch.tensor([hvd.rank() == 0, True, False])
        same(hvd.allreduce(flags, op=hvd.Min), torch.tensor([False, True, False]))
        z = torch.complex(values_of(hvd.rank()), values_of(hvd.rank() + 1))
        same(hvd.allreduce(z, op=hvd.Sum).real, all_values(hvd.size()).sum(0))


@on_ranks(2)
def test_every_form_of_allreduce() -> None:
    with horovod() as hvd:
        x, total = values_of(hvd.rank()), all_values(2).sum(0)
        before = x.clone()
        same(hvd.allreduce(x, op=hvd.Sum), total)
        same(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum, name="a")), total)
        same(x, before)
        for name in (None, "b"):
            y = x.clone()
            assert hvd.allreduce_(y, op=hvd.Sum, name=name) is y
            same(y, total)
            y = x.clone()
            assert hvd.synchronize(hvd.allreduce_async_(y, op=hvd.Sum, name=name)) is y
            same(y, total)
        with pytest.warns(DeprecationWarning, match="average= has been replaced by op="):
            same(hvd.allreduce(x, average=False), total)
        scalar = hvd.allreduce(torch.tensor(2.0 + hvd.rank()))
        same(scalar, torch.tensor(2.5))
        same(hvd.allreduce(torch.empty(0, 3)), torch.empty(0, 3))


@on_ranks(2)
def test_tensors_with_gaps_and_other_strides() -> None:
    with horovod() as hvd:
        total = all_values(2, (6, 4)).sum(0)
        x = values_of(hvd.rank(), (6, 4)).t()
        same(hvd.allreduce(x, op=hvd.Sum), total.t())
        wide = torch.zeros(6, 8)
        wide[:, ::2] = values_of(hvd.rank(), (6, 4))
        hvd.allreduce_(wide[:, ::2], op=hvd.Sum)
        same(wide[:, ::2], total)
        assert not wide[:, 1::2].any()
        same(hvd.allgather(wide[:, ::2])[:6], total)


@on_ranks(2)
def test_groups_small_and_large_together() -> None:
    with horovod() as hvd:
        shapes = [(3,), (400_000,), (2, 2), (), (0,), (7, 11)]
        xs = [values_of(hvd.rank() + i, shape) for i, shape in enumerate(shapes)]
        totals = [values_of(i, s) + values_of(i + 1, s) for i, s in enumerate(shapes)]
        results = [
            hvd.grouped_allreduce(xs, op=hvd.Sum),
            hvd.synchronize(hvd.grouped_allreduce_async(xs, op=hvd.Sum, name="g")),
            hvd.grouped_allreduce_([x.clone() for x in xs], op=hvd.Sum),
            hvd.synchronize(hvd.grouped_allreduce_async_([x.clone() for x in xs], op=hvd.Sum)),
        ]
        for result in results:
            for got, wanted in zip(result, totals, strict=True):
                same(got, wanted)
        mixed = hvd.grouped_allreduce([torch.ones(3), torch.ones(2, dtype=torch.int64)], op=hvd.Sum)
        same(mixed[1], torch.full((2,), 2))


@on_ranks(2)
def test_many_outstanding_at_once() -> None:
    with horovod() as hvd:
        handles = [hvd.allreduce_async(torch.full((i % 5 + 1,), float(i)), op=hvd.Sum) for i in range(700)]
        for i, handle in enumerate(handles):
            same(hvd.synchronize(handle), torch.full((i % 5 + 1,), 2.0 * i))


@on_ranks(2)
def test_factors() -> None:
    with horovod() as hvd:
        x = values_of(hvd.rank())
        total = all_values(2).sum(0)
        same(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5), total * 0.5)
        same(hvd.allreduce(x, op=hvd.Sum, postscale_factor=4.0), total * 4)
        same(hvd.allreduce(x, prescale_factor=2.0, postscale_factor=4.0), total * 4)
        integers = values_of(hvd.rank(), dtype=torch.int32)
        cut = sum((values_of(r, dtype=torch.int32).double() * 0.3).to(torch.int32) for r in range(2))
        assert isinstance(cut, torch.Tensor)
        same(hvd.allreduce(integers, op=hvd.Sum, prescale_factor=0.3), cut)
        rows = hvd.reducescatter(integers, op=hvd.Sum, postscale_factor=0.5)
        same(rows, (total.double() * 0.5).to(torch.int32)[3 * hvd.rank() : 3 * hvd.rank() + 3])


@on_ranks(2, 3)
def test_reducescatter() -> None:
    with horovod() as hvd:
        rank, size = hvd.rank(), hvd.size()
        start = sum(7 // size + (r < 7 % size) for r in range(rank))
        mine = slice(start, start + 7 // size + (rank < 7 % size))
        for dtype in (torch.int32, torch.int16, torch.float16, torch.float64):
            x, total = values_of(rank, (7, 2), dtype), all_values(size, (7, 2), dtype).sum(0).to(dtype)
            same(hvd.reducescatter(x, op=hvd.Sum), total[mine])
            same(hvd.synchronize(hvd.reducescatter_async(x, op=hvd.Sum, name="r")), total[mine])
        x = values_of(rank, (7, 2))
        assert torch.allclose(hvd.reducescatter(x), all_values(size, (7, 2)).mean(0)[mine])
        same(hvd.reducescatter(x, op=hvd.Max), all_values(size, (7, 2)).amax(0)[mine])
        pair = hvd.grouped_reducescatter([x, x[:1]], op=hvd.Sum)
        same(pair[0], all_values(size, (7, 2)).sum(0)[mine])
        assert pair[1].shape == ((1, 2) if rank == 0 else (0, 2))


@on_ranks(2)
def test_compressions() -> None:
    with horovod() as hvd:
        x = values_of(hvd.rank())
        same(hvd.allreduce(x, compression=hvd.Compression.fp16, op=hvd.Sum), all_values(2).sum(0))
        integers = x.int()
        same(hvd.allreduce(integers, compression=hvd.Compression.fp16, op=hvd.Sum), all_values(2).sum(0).int())
        rows = hvd.reducescatter(x[:4], compression=hvd.Compression.fp16, op=hvd.Sum)
        same(rows, all_values(2).sum(0)[2 * hvd.rank() : 2 * hvd.rank() + 2])


@on_ranks(4)
def test_adasum() -> None:
    with horovod() as hvd:
        everyones = all_values(4)
        same(hvd.allreduce(values_of(hvd.rank()), op=hvd.Adasum), combine(list(everyones)))
        alike = torch.tensor([1.0, 2.0])
        assert torch.allclose(hvd.allreduce(alike, op=hvd.Adasum), alike)
        apart = torch.eye(4)[hvd.rank()]
        assert torch.allclose(hvd.allreduce(apart, op=hvd.Adasum), torch.ones(4))


@on_ranks(3)
def test_adasum_wants_a_power_of_two() -> None:
    with horovod() as hvd:
        with pytest.raises(NotImplementedError, match="power of two of ranks, and there are 3"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)


@on_ranks(2)
def test_gradients_of_reductions() -> None:
    with horovod() as hvd:
        rank = hvd.rank()
        weights = values_of(rank)
        for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 0.5)):
            x = values_of(rank).requires_grad_()
            (hvd.allreduce(x, op=op) * weights).sum().backward()
            same(grad_of(x), all_values(2).sum(0) * factor)
            xs = [values_of(rank).requires_grad_(), torch.ones(2, requires_grad=True)]
            first, second = hvd.grouped_allreduce(xs, op=op)
            ((first * weights).sum() + second.sum()).backward()
            same(grad_of(xs[0]), all_values(2).sum(0) * factor)
            same(grad_of(xs[1]), torch.full((2,), 2 * factor))
        x = values_of(rank, (4, 3)).requires_grad_()
        hvd.reducescatter(x, op=hvd.Sum).sum().backward()
        same(grad_of(x), torch.full((4, 3), 2.0))
        x = values_of(rank, (4, 3)).requires_grad_()
        hvd.reducescatter(x, op=hvd.Average, prescale_factor=3.0).sum().backward()
        same(grad_of(x), torch.full((4, 3), 3.0))
