"""Products of matrices with few columns: bit for bit in the order of csrc/kernels/low_rank.h, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pycomm import kernels
from pycomm.kernels import LowRank
from tests.kernels.bucket import KINDS, bucket, flat
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import FLOATS, assert_same_bits, simd

__all__ = ["gpu", "simd"]

SHAPES = [(1, 1), (3, 5), (17, 64), (64, 17), (9, 1000), (130, 33)]
RANKS = [1, 2, 3, 4, 7, 16, 32]
each_rank = pytest.mark.parametrize("rank", RANKS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def some(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cut(memory: torch.Tensor, shapes: Any) -> list[torch.Tensor]:
    parts = memory.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def row_products(m: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return M Q, summed in lanes of a cache line, then by halves."""
    lanes = 64 // m.element_size()
    sums = torch.zeros(m.shape[0], q.shape[1], lanes, dtype=m.dtype)
    for begin in range(0, m.shape[1], lanes):
        products = m[:, None, begin : begin + lanes] * q.t()[None, :, begin : begin + lanes]
        sums[..., : products.shape[-1]] += products
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def column_products(m: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return M^T P, summed row by row."""
    sums = torch.zeros(m.shape[1], p.shape[1], dtype=m.dtype)
    for row, factors in zip(m, p, strict=True):
        sums += row[:, None] * factors[None, :]
    return sums


def with_outer_products(m: torch.Tensor | None, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return M + P Q^T, product by product."""
    for k in range(p.shape[1]):
        product = p[:, k, None] * q[None, :, k]
        m = product if m is None else m + product
    assert m is not None
    return m


@pytest.mark.usefixtures("simd")
@each_rank
@each_dtype
def test_products_bit_for_bit(rank: int, dtype: torch.dtype) -> None:
    config, count = LowRank(SHAPES, rank), sum(rows * columns for rows, columns in SHAPES)
    m, q = some(count, dtype, 1), some(config.num_q, dtype, 2)
    p, acc = torch.empty(config.num_p, dtype=dtype), torch.empty(count, dtype=dtype)
    finite = kernels.accumulate_low_rank(acc, None, cut(m, SHAPES), 1.0, config, q, p)
    assert finite.tolist() == [True] * len(SHAPES)
    assert_same_bits(acc, m)
    matrices, ps, qs = cut(m, SHAPES), cut(p, config.p_shapes), cut(q, config.q_shapes)
    for matrix, one_p, one_q in zip(matrices, ps, qs, strict=True):
        assert_same_bits(one_p, row_products(matrix, one_q))
    kernels.split_low_rank(acc, config, p, q)
    for matrix, rest, one_p, one_q in zip(matrices, cut(acc, SHAPES), ps, qs, strict=True):
        assert_same_bits(one_q, column_products(matrix, one_p))
        assert_same_bits(rest, with_outer_products(matrix, -one_p, one_q))
    kernels.expand_low_rank(acc, config, p, q, 0.3)
    for out, one_p, one_q in zip(cut(acc, SHAPES), ps, qs, strict=True):
        assert_same_bits(out, with_outer_products(None, one_p * torch.tensor(0.3, dtype=dtype), one_q))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_sums_are_those_of_accumulate(dtype: torch.dtype, kind: str) -> None:
    shapes = [(7, 30), (1, 33), (64, 2)]
    given = bucket([rows * columns for rows, columns in shapes], dtype, kind)
    config = LowRank(shapes, 4)
    acc, velocity = flat(given.size, given.wide), flat(given.size, given.wide)
    q, p = some(config.num_q, given.wide), torch.empty(config.num_p, dtype=given.wide)
    wanted, wanted_velocity = given.sums()
    finite = kernels.accumulate_low_rank(
        acc, given.residual, given.grads, given.scale, config, q, p, **given.options(velocity)
    )
    assert_same_bits(acc, wanted)
    if wanted_velocity is not None:
        assert_same_bits(velocity, wanted_velocity)
    assert finite.tolist() == [bool(part.isfinite().all()) for part in wanted.split([g.numel() for g in given.grads])]
    products = [row_products(m, one) for m, one in zip(cut(wanted, shapes), cut(q, config.q_shapes), strict=True)]
    assert_same_bits(p, torch.cat([product.flatten() for product in products]))


@pytest.mark.parametrize("threads", [1, 3])
def test_large_streamed_and_threaded(threads: int) -> None:
    """One matrix of several chunks that threads share, and a gradient of ones to be found not finite."""
    shapes = [(1500, 1700), (3, 5), (40, 30_000)]
    config, count = LowRank(shapes, 3), sum(rows * columns for rows, columns in shapes)
    m, q = some(count, torch.float32), some(config.num_q, torch.float32)
    found = []
    for number in (1, threads):
        kernels.set_num_threads(number)
        try:
            acc, p, new_q = torch.empty(count + 1)[1:], torch.empty(config.num_p), torch.empty(config.num_q)
            kernels.accumulate_low_rank(acc, None, cut(m, shapes), 0.5, config, q, p)
            kernels.orthogonalize(p, config)
            kernels.split_low_rank(acc, config, p, new_q)
            out = torch.empty(count)
            kernels.expand_low_rank(out, config, p, new_q)
        finally:
            kernels.set_num_threads(None)
        found.append((acc, p, new_q, out))
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
    acc, _, _, out = found[0]
    torch.testing.assert_close(acc.double() + out.double(), 0.5 * m.double(), rtol=0.0, atol=1e-5)
    for rest, one_p in zip(cut(acc, shapes), cut(found[0][1], config.p_shapes), strict=True):
        assert float((one_p.double().t() @ rest.double()).abs().max()) < 1e-3, "what is left has no part along P"
    m[-1] = float("nan")
    finite = kernels.accumulate_low_rank(acc, None, cut(m, shapes), 0.5, config, q, torch.empty(config.num_p))
    assert finite.tolist() == [True, True, False]


@each_rank
@each_dtype
def test_columns_become_orthonormal(rank: int, dtype: torch.dtype) -> None:
    """Also of columns that are almost, or exactly, along others, and very long and very short."""
    config = LowRank([(rank, rank), (200, 50), (200, 50), (200, 50)], rank)
    p = some(config.num_p, dtype)
    _, scaled, almost, exactly = cut(p, config.p_shapes)
    scaled.mul_(torch.logspace(-30, 30, scaled.shape[1]).to(dtype))
    almost.copy_(almost[:, :1] + 1e-5 * almost)
    exactly.copy_(exactly[:, :1] * torch.arange(exactly.shape[1]))
    after = p.clone()
    kernels.orthogonalize(after, config)
    assert_orthonormal(p, after, config)


def assert_orthonormal(before: torch.Tensor, after: torch.Tensor, config: LowRank) -> None:
    """And that the columns span what they spanned."""
    tolerance = 1e-6 if before.dtype == torch.float32 else 1e-13
    for old, new in zip(cut(before, config.p_shapes), cut(after, config.p_shapes), strict=True):
        wide = new.double()
        error = wide.t() @ wide - torch.eye(new.shape[1], dtype=torch.float64)
        assert float(error.abs().max()) < tolerance
        lost = old.double() - wide @ (wide.t() @ old.double())
        assert float((lost.norm(dim=0) / old.double().norm(dim=0).clamp(min=1e-300)).max()) < 10 * tolerance


def test_zeros_become_unit_vectors_and_nan_ends() -> None:
    config = LowRank([(5, 9), (3, 3)], 3)
    p = torch.zeros(config.num_p)
    kernels.orthogonalize(p, config)
    for found in cut(p, config.p_shapes):
        assert torch.equal(found, torch.eye(*found.shape))
    p.fill_(float("nan"))
    kernels.orthogonalize(p, config)
    assert bool(p.isnan().all())


@requires_gpu
@each_dtype
def test_columns_on_a_gpu(gpu: Gpu, dtype: torch.dtype) -> None:
    config = LowRank([(4, 4), (200, 50), (1, 7), (3000, 9), (70, 50)], 4)
    p, scratch = some(config.num_p, dtype), kernels.Scratch()
    p[-4 * 70 :] = p[-4 * 70 :].view(70, 4)[:, :1].mul(torch.arange(4)).flatten()
    found = gpu.put(p)
    kernels.orthogonalize(found, config, scratch=scratch)
    assert_orthonormal(p, gpu.get(found), config)
    wanted = p.clone()
    kernels.orthogonalize(wanted, config)
    close = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(gpu.get(found)[: -4 * 70], wanted[: -4 * 70], rtol=close, atol=close)
    for value, answer in ((0.0, torch.eye(200, 4, dtype=dtype)), (float("nan"), torch.full((200, 4), float("nan")))):
        found = gpu.put(torch.full_like(p, value))
        kernels.orthogonalize(found, config, scratch=scratch)
        torch.testing.assert_close(cut(gpu.get(found), config.p_shapes)[1], answer.to(dtype), equal_nan=True)


ANYTHING: Any = "rank 2"
M, ONE = torch.zeros(12), LowRank([(3, 4)], 2)
P, Q = torch.zeros(6), torch.zeros(8)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: kernels.split_low_rank(M, ANYTHING, P, Q), TypeError, "config is a str, wanted a LowRank"),
        (lambda: kernels.split_low_rank(M, LowRank([(3, 4)], 0), P, Q), ValueError, "rank is 0, wanted at least 1"),
        (
            lambda: kernels.split_low_rank(M, LowRank([ANYTHING], 1), P, Q),
            TypeError,
            r"shapes\[0\] is 'rank 2', wanted a pair",
        ),
        (lambda: kernels.split_low_rank(M, LowRank([(0, 4)], 1), P, Q), ValueError, r"shapes\[0\] is \(0, 4\), wanted"),
        (lambda: kernels.split_low_rank(M[1:], ONE, P, Q), ValueError, "m has 11 elements, wanted 12"),
        (lambda: kernels.split_low_rank(M, ONE, P[1:], Q), ValueError, "p has 5 elements, wanted 6"),
        (lambda: kernels.split_low_rank(M, ONE, P.double(), Q), TypeError, "p has dtype float64, wanted float32"),
        (lambda: kernels.split_low_rank(M, ONE, P, M[:8]), ValueError, "m overlaps q|q overlaps m"),
        (lambda: kernels.orthogonalize(P[1:], ONE), ValueError, "p has 5 elements, wanted 6"),
        (lambda: kernels.expand_low_rank(M.half(), ONE, P, Q), TypeError, "out has dtype float16, wanted float32"),
        (lambda: kernels.expand_low_rank(M, ONE, P, Q, "1"), TypeError, "scale"),
        (
            lambda: kernels.accumulate_low_rank(M, None, [M[:4].clone(), M[4:].clone()], 1.0, ONE, Q, P),
            ValueError,
            "shapes has 1 elements, wanted 2",
        ),
        (
            lambda: kernels.accumulate_low_rank(M, None, [M.clone()], 1.0, LowRank([(2, 4)], 2), Q, P[:4]),
            ValueError,
            r"grads\[0\] has 12 elements, wanted 8",
        ),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()
