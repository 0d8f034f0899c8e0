"""Exact top-k on a GPU: the same sets as the CPU kernel, which is compared with torch.topk in test_topk.py."""

from __future__ import annotations

import math

import pytest
import torch

from pycomm import kernels
from tests.kernels.gpus import Gpu, gpu, large_team, requires_gpu
from tests.kernels.reference import FLOATS, assert_same_bits, interesting

__all__ = ["gpu", "large_team"]
pytestmark = requires_gpu

BIG = 70_000  # beyond this size candidates are collected by a threshold


def assert_topk(gpu: Gpu, x: torch.Tensor, k: int, threshold: float | None = None, offset: int = 0) -> float:
    """Compares with the CPU; returns the k-th magnitude that the GPU left in ``threshold``."""
    memory = torch.cat([torch.full((offset,), math.inf, dtype=x.dtype), x])
    on_gpu = gpu.put(memory[offset:])
    values, indices = kernels.topk(x, k)
    kept = None if threshold is None else gpu.put(torch.tensor(threshold))
    got_values, got_indices = kernels.topk(on_gpu, k, threshold=kept)
    assert_same_bits(gpu.get(got_indices), indices)
    assert_same_bits(gpu.get(got_values), values)
    if kept is None:
        return math.nan
    kth = values.float().abs().nan_to_num(nan=math.inf).min()
    left: float = gpu.get(kept).item()
    assert left == kth or (math.isnan(left) and values.isnan().any())
    return left


def gradient(n: int, seed: int = 1) -> torch.Tensor:
    """Gaussian, but of three scales along the array, as layers have."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    x[n // 3 :] *= 0.1
    x[2 * n // 3 :] *= 30.0
    return x


@pytest.mark.parametrize("dtype", FLOATS)
def test_small(gpu: Gpu, dtype: torch.dtype) -> None:
    for n in (1, 2, 31, 1000, 8193, 20_000):
        x = interesting(n, dtype, n)
        for k in {1, 2, n // 3, n - 1, n} - {0}:
            if k <= n:
                assert_topk(gpu, x, k, offset=k % 5)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_big(gpu: Gpu, dtype: torch.dtype, offset: int) -> None:
    assert_topk(gpu, gradient(BIG).to(dtype), 70, offset=offset)
    assert_topk(gpu, interesting(BIG + 5, dtype, 8), 900, offset=offset)


@pytest.mark.parametrize("dtype", FLOATS)
def test_warm(gpu: Gpu, dtype: torch.dtype) -> None:
    x = gradient(BIG).to(dtype)
    left = assert_topk(gpu, x, 100, threshold=0.0)
    again = assert_topk(gpu, x, 100, threshold=left)
    assert again == left
    # Guesses that are of no use change nothing in the result.
    for guess in (left * 1.5, left * 100, left / 1000, 1e-30, math.inf, math.nan, -1.0):
        assert assert_topk(gpu, x, 100, threshold=guess) == left


def test_ties_and_specials(gpu: Gpu) -> None:
    nearly_constant = torch.full((BIG,), 0.5)
    nearly_constant[40_000:40_010] = -0.75
    special = gradient(BIG)
    special[::100] = torch.nan
    special[5::1000] = -torch.inf
    signed_zeros = torch.zeros(BIG)
    signed_zeros[::3] = -0.0
    signed_zeros[60_000] = 1e-45
    for x in (torch.zeros(BIG), signed_zeros, torch.full((BIG,), -3.0), nearly_constant, special):
        for k in (1, 5, 1000, BIG // 2, BIG):
            assert_topk(gpu, x, k, threshold=0.7)


def test_orders_that_mislead_a_sample(gpu: Gpu) -> None:
    x = gradient(BIG)
    ascending = x.abs().sort().values
    concentrated = torch.full((BIG,), 1e-3)
    concentrated[1000:3000] = torch.rand(2000, generator=torch.Generator().manual_seed(2)) + 1.0
    # The sample takes 16 of every (n - 16) // 2048 elements: all that is large lies beside it.
    beside = torch.full((200_000,), 1e-3)
    beside[torch.arange(200_000) % 97 >= 16] = 1.0
    for adversarial in (ascending, ascending.flip(0), concentrated, beside):
        for k in (10, 700):
            assert_topk(gpu, adversarial, k, threshold=0.0)


def test_a_large_team(large_team: tuple[Gpu, int]) -> None:
    gpu, n = large_team
    left = assert_topk(gpu, gradient(n), n // 1000, threshold=0.0)
    assert assert_topk(gpu, gradient(n), n // 1000, threshold=left) == left
    assert_topk(gpu, torch.ones(n), n // 2)  # ties in all blocks: by radix


def test_scratch_is_reused(gpu: Gpu) -> None:
    scratch = kernels.Scratch()
    for n, k in ((BIG, 70), (100, 3), (BIG, 700), (BIG, 70)):
        x = gradient(n, seed=n + k)
        values, indices = kernels.topk(x, k)
        got_values, got_indices = kernels.topk(gpu.put(x), k, scratch=scratch)
        assert_same_bits(gpu.get(got_indices), indices)
        assert_same_bits(gpu.get(got_values), values)
        # Another kernel's table in the same memory must not be taken for one that is still there.
        out = gpu.garbage(3, torch.float32)
        kernels.pack([gpu.put(torch.ones(3))], out, scratch=scratch)
        assert gpu.get(out).tolist() == [1.0, 1.0, 1.0]


def test_bad_arguments(gpu: Gpu) -> None:
    x = gpu.put(torch.zeros(10))
    for k in (0, 11, -1):
        with pytest.raises(ValueError, match=f"k is {k}, wanted 1 <= k <= 10"):
            kernels.topk(x, k)
    with pytest.raises(TypeError, match="x has dtype int32"):
        kernels.topk(gpu.put(torch.zeros(10, dtype=torch.int32)), 1)
    with pytest.raises(ValueError, match="threshold is on cpu, x on cuda:0; wanted all arrays on one device"):
        kernels.topk(x, 1, threshold=torch.zeros(()))
