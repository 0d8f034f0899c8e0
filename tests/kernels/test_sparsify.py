"""sparsify: the sums are accumulate's, and of every gradient's what a stable sort by magnitude puts first."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pycomm import kernels
from tests.kernels.bucket import KINDS, SIZES, Bucket, bucket, flat
from tests.kernels.gpus import Gpu, gpu, large_team, requires_gpu
from tests.kernels.reference import FLOATS, assert_same_bits, simd
from tests.kernels.test_topk import exact_order

__all__ = ["gpu", "large_team", "simd"]

COUNTS = [1, 60, 0, 1, 100, 0, 511, 0, 65, 1, 1]
"""Of SIZES: some, none, all, one half."""


class Sparsified:
    """What one call leaves, on the CPU."""

    def __init__(
        self, given: Bucket, counts: list[int], thresholds: torch.Tensor, gpu: Gpu | None = None, gap: int = 0
    ) -> None:
        put = (lambda tensor: tensor) if gpu is None else gpu.put
        get = (lambda tensor: tensor) if gpu is None else gpu.get
        k = sum(counts)
        arrays = [flat(given.size, given.wide, gap) for _ in range(2)]
        arrays += [flat(k, given.wide), flat(k, torch.int32), thresholds.clone()]
        on_device = [put(array) for array in arrays]
        acc, velocity, values, indices, limits = on_device
        moved = given.moved(put)
        options = moved.options(velocity)
        flags = kernels.sparsify(
            acc, moved.residual, moved.grads, counts, (values, indices), limits, moved.scale, **options
        )
        self.acc, self.velocity, self.values, self.indices, self.thresholds = [get(array) for array in on_device]
        self.finite, self.missed = [get(flag).tolist() for flag in flags]

    def assert_same_as(self, other: Sparsified) -> None:
        for name in ("acc", "velocity", "values", "indices", "thresholds"):
            assert_same_bits(getattr(self, name), getattr(other, name))
        assert self.finite == other.finite


def check(given: Bucket, counts: list[int], thresholds: torch.Tensor) -> Sparsified:
    """On the CPU, against accumulate and a sort."""
    found = Sparsified(given, counts, thresholds)
    acc, velocity = flat(given.size, given.wide), flat(given.size, given.wide)
    assert given.accumulate(acc, velocity).tolist() == found.finite
    assert_same_bits(found.acc, acc)
    assert_same_bits(found.velocity, velocity)
    at = 0
    wanted, limits = [], []
    for j, (grad, k) in enumerate(zip(given.grads, counts, strict=True)):
        part = acc[at : at + grad.numel()]
        chosen = torch.sort(exact_order(part), descending=True, stable=True).indices[:k]
        wanted.append(chosen.sort().values.int() + at)
        limits.append(part[chosen[-1]].abs().float().item() if k > 0 else thresholds[j].item())
        at += grad.numel()
    assert_same_bits(found.indices, torch.cat(wanted))
    assert_same_bits(found.values, acc[found.indices.long()])
    assert_same_bits(found.thresholds, torch.tensor(limits))
    return found


def thresholds_of(given: Bucket, counts: list[int], factor: float = 1.0) -> torch.Tensor:
    """What an earlier step with the same sums would have left."""
    return Sparsified(given, counts, torch.zeros(len(counts))).thresholds * factor


@pytest.mark.pairwise
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_against_a_sort(dtype: torch.dtype, kind: str) -> None:
    for sizes, counts in (([0], [0]), ([1], [1]), ([1], [0]), ([40], [1]), (SIZES, COUNTS), (SIZES, [0] * len(SIZES))):
        given = bucket(sizes, dtype, kind)
        cold = check(given, counts, torch.zeros(len(sizes)))
        assert not any(cold.missed)
        warm = check(given, counts, cold.thresholds)
        assert not any(warm.missed)
    check(bucket(SIZES, dtype, kind, special=True), COUNTS, torch.ones(len(SIZES)))


@pytest.mark.parametrize("useless", [1e30, 1e-30, math.inf, math.nan, -1.0, 0.0])
def test_a_threshold_changes_nothing(useless: float) -> None:
    given = bucket([20_000, 5, 30_000], torch.float32, "momentum")
    counts = [200, 1, 30]
    found = check(given, counts, torch.full((3,), useless))
    tried = math.isfinite(useless) and useless > 0.0
    if useless == 1e30:
        assert found.missed == [True, True, True]
    elif tried:  # more than there is room for, but where that is nearly nothing
        assert found.missed[::2] == [True, True]
    else:
        assert found.missed == [False, False, False]


HOSTILE = {
    "constant": torch.full((20_000,), -0.5),
    "zeros": torch.zeros(20_000),
    "signed zeros": torch.zeros(10_000).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat(10_000),
    "ascending": torch.arange(20_000).float(),
    "few values": torch.arange(20_000).remainder(7).float() - 3,
    "large in one place": torch.cat([torch.full((19_800,), 1e-3), torch.arange(200).float() + 1.0]),
    "all nan": torch.full((20_000,), torch.nan),
    "some inf": torch.where(torch.arange(20_000) % 50 == 0, -torch.inf, 1.0),
    "subnormal": torch.arange(20_000).float() * 1e-45,
}


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    given = Bucket([HOSTILE[name], HOSTILE[name].flip(0)[:777]], 1.0)
    for counts in ([1, 1], [200, 7], [10_000, 388], [20_000, 777]):
        check(given, counts, torch.zeros(2))
        check(given, counts, thresholds_of(given, counts))
        check(given, counts, torch.full((2,), 0.5))


@pytest.mark.usefixtures("simd")
def test_large() -> None:
    """Sums that are streamed, with a gradient whose place in them begins 256 bytes into a page."""
    given = bucket([1 << 20 | 64, 1 << 20 | 3], torch.float32, "momentum")
    counts = [1000, 20_000]
    cold = check(given, counts, torch.zeros(2))
    assert check(given, counts, cold.thresholds).missed == [False, False]


def test_threads() -> None:
    given = bucket([1_000_003, 17, 600_000], torch.float32, "nesterov")
    counts = [1000, 1, 60_000]
    kernels.set_num_threads(2)
    try:
        cold = check(given, counts, torch.zeros(3))
        assert check(given, counts, cold.thresholds).missed == [False, False, False]
    finally:
        kernels.set_num_threads(None)


BAD: dict[str, dict[str, Any]] = {
    "counts has 1 elements, wanted 2: one per gradient": {"counts": [1]},
    "counts[1] is 3, wanted 0 <= count <= 2, the elements of grads[1]": {"counts": [0, 3]},
    "counts[0] is -1, wanted 0 <= count <= 4": {"counts": [-1, 3]},
    "values has 3 elements, wanted 2": {"out": (torch.ones(3), torch.ones(2).int())},
    "values has dtype float64, wanted float32": {"out": (torch.ones(2).double(), torch.ones(2).int())},
    "indices has dtype int64, wanted int32": {"out": (torch.ones(2), torch.ones(2).long())},
    "indices has 1 elements, wanted 2": {"out": (torch.ones(2), torch.ones(1).int())},
    "thresholds has 1 elements, wanted 2: one float32 per gradient": {"thresholds": torch.zeros(1)},
    "thresholds has dtype float64, wanted float32": {"thresholds": torch.zeros(2).double()},
    "grads is empty": {"grads": [], "counts": []},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message: str) -> None:
    arguments: dict[str, Any] = {
        "grads": [torch.ones(4), torch.ones(2)],
        "counts": [1, 1],
        "out": (torch.ones(2), torch.ones(2).int()),
        "thresholds": torch.zeros(2),
        **BAD[message],
    }
    with pytest.raises((TypeError, ValueError)) as raised:
        kernels.sparsify(torch.zeros(6), None, **arguments)
    assert message in str(raised.value)


def check_on_gpu(gpu: Gpu, given: Bucket, counts: list[int], thresholds: torch.Tensor, gap: int = 0) -> Sparsified:
    found = Sparsified(given, counts, thresholds, gpu, gap)
    found.assert_same_as(Sparsified(given, counts, thresholds))
    return found


@requires_gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_gpu(gpu: Gpu, dtype: torch.dtype) -> None:
    for kind in ("bare", "nesterov"):
        given = bucket(SIZES, dtype, kind)
        cold = check_on_gpu(gpu, given, COUNTS, torch.zeros(len(SIZES)))
        assert not any(cold.missed)
        warm = check_on_gpu(gpu, given, COUNTS, cold.thresholds)
        assert not any(warm.missed)
        check_on_gpu(gpu, given, COUNTS, cold.thresholds * 2)
    check_on_gpu(gpu, given, [0] * len(SIZES), torch.ones(len(SIZES)))
    check_on_gpu(gpu, bucket(SIZES, dtype, "residual", special=True), COUNTS, torch.ones(len(SIZES)))


@requires_gpu
def test_gpu_sizes_and_alignments(gpu: Gpu) -> None:
    for sizes, counts in (([0], [0]), ([1], [1]), ([1, 0, 1], [0, 0, 1]), ([31, 33, 4096], [15, 16, 40])):
        for gap in (0, 1, 3):
            given = bucket(sizes, torch.float32, "momentum", gap=gap)
            check_on_gpu(gpu, given, counts, torch.zeros(len(sizes)), gap)
            check_on_gpu(gpu, given, counts, thresholds_of(given, counts), gap)


@requires_gpu
def test_gpu_big(gpu: Gpu) -> None:
    given = bucket([70_000, 3, 20_000], torch.float32, "residual")
    counts = [700, 1, 20]
    cold = check_on_gpu(gpu, given, counts, torch.zeros(3))
    assert check_on_gpu(gpu, given, counts, cold.thresholds).missed == [False] * 3
    assert check_on_gpu(gpu, given, counts, torch.full((3,), 1e30)).missed == [True] * 3
    assert check_on_gpu(gpu, given, counts, cold.thresholds / 100).missed[0]
    for useless in (math.inf, math.nan, -1.0):
        assert check_on_gpu(gpu, given, counts, torch.full((3,), useless)).missed == [False] * 3


@requires_gpu
def test_gpu_a_large_team(large_team: tuple[Gpu, int]) -> None:
    """Beside one of few blocks, which shares the last of its own with it."""
    gpu, n = large_team
    given, counts = bucket([n - 20_001, 20_001], torch.float32, "residual"), [n // 1000, 20]
    cold = check_on_gpu(gpu, given, counts, torch.zeros(2))
    assert check_on_gpu(gpu, given, counts, cold.thresholds).missed == [False] * 2


@requires_gpu
@pytest.mark.parametrize("name", HOSTILE)
def test_gpu_hostile(gpu: Gpu, name: str) -> None:
    given = Bucket([HOSTILE[name][:9000], HOSTILE[name].flip(0)[:777]], 1.0)
    for counts in ([1, 1], [200, 7], [4500, 388], [9000, 777]):
        check_on_gpu(gpu, given, counts, thresholds_of(given, counts))
    check_on_gpu(gpu, given, [200, 7], torch.full((2,), 0.5))


@requires_gpu
def test_gpu_scratch_is_reused(gpu: Gpu) -> None:
    scratch = kernels.Scratch()
    given = bucket(SIZES, torch.float16, "residual")
    thresholds, wanted_thresholds = gpu.put(torch.zeros(len(SIZES))), torch.zeros(len(SIZES))
    moved = given.moved(gpu.put)
    for step in range(4):  # the table is there already from the second one on
        counts = COUNTS if step < 3 else [min(size, 2) for size in SIZES]
        wanted = Sparsified(given, counts, wanted_thresholds)
        out = gpu.garbage(sum(counts), torch.float32), gpu.garbage(sum(counts), torch.int32)
        acc = gpu.garbage(given.size, torch.float32)
        options = moved.options(None)
        kernels.sparsify(acc, moved.residual, moved.grads, counts, out, thresholds, 0.3, scratch=scratch, **options)
        assert_same_bits(gpu.get(out[0]), wanted.values)
        assert_same_bits(gpu.get(out[1]), wanted.indices)
        assert_same_bits(gpu.get(thresholds), wanted.thresholds)
        wanted_thresholds = wanted.thresholds
