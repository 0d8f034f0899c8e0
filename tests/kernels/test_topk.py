"""topk is exact: the same set as a stable sort by magnitude, on friendly and hostile inputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pycomm import kernels
from tests.kernels.reference import FLOATS, assert_same_bits, interesting, misaligned, simd

__all__ = ["simd"]

N = 200_000  # above the size where sampling begins


def check(x: torch.Tensor, k: int) -> None:
    values, indices = kernels.topk(x, k)
    order = torch.sort(exact_order(x), descending=True, stable=True).indices
    wanted = order[:k].sort().values.int()
    assert indices.dtype == torch.int32
    assert torch.equal(indices, wanted)
    assert_same_bits(values, x.flatten()[wanted.long()])


def exact_order(x: torch.Tensor) -> torch.Tensor:
    """Integers that order magnitudes; all NaNs equal, above inf."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    keys = x.flatten().abs().view(bits).long()
    infinity = torch.tensor([torch.inf], dtype=x.dtype).view(bits).long()
    return torch.minimum(keys, infinity + 1)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("ratio", [0.0001, 0.001, 0.01, 0.2, 0.5, 1.0])
def test_random(ratio: float) -> None:
    check(torch.randn(N), max(1, int(ratio * N)))


HOSTILE = {
    "constant": torch.ones(N),
    "zeros": torch.zeros(N),
    "signed zeros": torch.zeros(N) * torch.tensor([1.0, -1.0]).repeat(N // 2),
    "ascending": torch.arange(N).float(),
    "descending": -torch.arange(N, 0, -1).float(),
    "few values": torch.randint(-3, 4, (N,)).float(),
    "mostly zero": torch.randn(N) * (torch.rand(N) < 0.0005),
    "large in one place": torch.cat([torch.randn(N - 300) * 1e-3, torch.randn(300)]),
    "sample sees only small ones": torch.where(torch.arange(N) % 97 < 16, 1e-6, 1.0) * torch.randn(N),
    "all nan": torch.full((N,), torch.nan),
    "nan and inf": interesting(N, torch.float32, seed=1),
    "one nan": torch.cat([torch.randn(N - 1), torch.tensor([torch.nan])]),
    "many infs": torch.where(torch.rand(N) < 0.3, torch.inf, torch.randn(N)),
    "subnormal": torch.randn(N) * 1e-42,
}


@pytest.mark.pairwise
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("k", [1, 2, 199, 2_000, N // 4, N // 4 + 1, N])
def test_hostile(name: str, k: int) -> None:
    check(HOSTILE[name], k)


@pytest.mark.usefixtures("simd")
@given(n=st.integers(1, 3000), k=st.integers(1, 3000), seed=st.integers(0, 99), dtype=st.sampled_from(FLOATS))
def test_small_and_every_type(n: int, k: int, seed: int, dtype: torch.dtype) -> None:
    check(interesting(n, dtype, seed), min(k, n))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads(threads: int) -> None:
    x = torch.randn(1_000_003)
    kernels.set_num_threads(threads)
    try:
        check(x, 1000)
        check(x, 100_000)
        check(torch.ones(1_000_003), 77)
    finally:
        kernels.set_num_threads(None)


@pytest.mark.parametrize("offset", [0, 4, 1, 3])
def test_alignment_and_numpy(offset: int) -> None:
    x = torch.randn(N)
    values, indices = kernels.topk(misaligned(x, offset), 500)
    assert isinstance(values, np.ndarray)
    assert isinstance(indices, np.ndarray)
    wanted, where = kernels.topk(x, 500)
    assert np.array_equal(values, wanted.numpy())
    assert np.array_equal(indices, where.numpy())


def test_shape_is_flat_and_output_may_be_given() -> None:
    x = torch.randn(50, 40)
    out = torch.empty(7), torch.empty(7, dtype=torch.int32)
    values, _ = kernels.topk(x, 7, out=out)
    assert values is out[0]
    assert torch.equal(x.flatten()[out[1].long()], out[0])


@pytest.mark.parametrize("k", [0, -1, 101, 2**40])
def test_k_out_of_range(k: int) -> None:
    with pytest.raises(ValueError, match=f"k is {k}, wanted 1 <= k <= 100"):
        kernels.topk(torch.randn(100), k)


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="x has dtype int64"):
        kernels.topk(torch.arange(10), 1)
    with pytest.raises(ValueError, match="k is 1, wanted 1 <= k <= 0"):
        kernels.topk(torch.empty(0), 1)
    with pytest.raises(ValueError, match="2147483649 elements, wanted at most 2147483647"):
        kernels.topk(torch.empty(2**31 + 1, dtype=torch.float16), 1)


def test_a_threshold_of_an_earlier_call_saves_work_and_changes_nothing() -> None:
    x = torch.randn(100_000)
    values, indices = kernels.topk(x, 100)
    threshold = torch.zeros(1)
    for guess in (0.0, None, 1e30, 1e-30, math.nan, -1.0, math.inf):
        if guess is not None:
            threshold[0] = guess
        got_values, got_indices = kernels.topk(x, 100, threshold=threshold, scratch=kernels.Scratch())
        assert torch.equal(got_values, values)
        assert torch.equal(got_indices, indices)
        assert threshold.item() == values.abs().min()
    with pytest.raises(TypeError, match="threshold has dtype float64, wanted float32 as one float32"):
        kernels.topk(x, 1, threshold=torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", FLOATS)
def test_without_a_threshold_whatever_lies_on_the_stack(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(4)).to(dtype)
    out = torch.empty(3, dtype=dtype), torch.empty(3, dtype=torch.int32)
    for _ in range(3):
        kernels.topk(x, 3, threshold=torch.zeros(1))
        kernels.topk(x, 3, out, scratch=kernels.Scratch())
        assert out[1].tolist() == x.float().abs().topk(3).indices.sort().values.tolist()
