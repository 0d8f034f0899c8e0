"""accumulate: the CPU's against torch, rounded at every step; a GPU's against the CPU's, which is the specification."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pycomm import kernels
from tests.kernels.bucket import KINDS, SIZES, Bucket, bucket, flat
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import FLOATS, assert_same_bits, misaligned, simd

__all__ = ["gpu", "simd"]


def check(given: Bucket, gap: int = 0) -> None:
    """On the CPU."""
    acc, velocity = flat(given.size, given.wide, gap), flat(given.size, given.wide, gap)
    finite = given.accumulate(acc, velocity)
    wanted_acc, wanted_velocity = given.sums()
    assert_same_bits(acc, wanted_acc)
    if wanted_velocity is not None:
        assert_same_bits(velocity, wanted_velocity)
    parts = torch.split(wanted_acc, [grad.numel() for grad in given.grads])
    assert finite.tolist() == [bool(part.isfinite().all()) for part in parts]


def check_on_gpu(gpu: Gpu, given: Bucket, gap: int = 0, scratch: kernels.Scratch | None = None) -> None:
    acc, velocity = flat(given.size, given.wide), flat(given.size, given.wide)
    finite = given.accumulate(acc, velocity)
    gpu_acc, gpu_velocity = gpu.put(flat(given.size, given.wide, gap)), gpu.put(flat(given.size, given.wide, gap))
    gpu_finite = given.moved(gpu.put).accumulate(gpu_acc, gpu_velocity, scratch)
    assert_same_bits(gpu.get(gpu_acc), acc)
    assert_same_bits(gpu.get(gpu_velocity), velocity)
    assert gpu.get(gpu_finite).tolist() == finite.tolist()


@pytest.mark.pairwise
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_against_torch(dtype: torch.dtype, kind: str) -> None:
    for sizes in ([0], [1], [31, 32, 33], [63], [64], [65], SIZES):
        check(bucket(sizes, dtype, kind))
    check(bucket(SIZES, dtype, kind, gap=1), gap=3)
    check(bucket(SIZES, dtype, kind, special=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_and_threaded(dtype: torch.dtype) -> None:
    kernels.set_num_threads(2)
    try:
        check(bucket([1_500_000, 3, 999_999], dtype, "nesterov"), gap=1)
        check(bucket([2_500_000], dtype, "residual"))
    finally:
        kernels.set_num_threads(None)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("kind", ["residual", "weights", "momentum"])
@pytest.mark.parametrize("ahead", [4, 256, 512, 516])
def test_sums_a_little_ahead_of_gradients(ahead: int, kind: str) -> None:
    """In the 12 lowest bits of their addresses, by bytes: the CPU reads such gradients through copies of pages."""
    given = bucket([2_100_007], torch.float32, kind)
    wanted_acc, wanted_velocity = given.sums()
    acc, velocity = flat(given.size, torch.float32), flat(given.size, torch.float32)

    def behind(array: torch.Tensor) -> torch.Tensor:
        room = torch.empty(array.numel() + 1024)
        begin = (acc.data_ptr() - ahead - room.data_ptr()) % 4096 // 4
        return room[begin : begin + array.numel()].copy_(array)

    moved = replace(given, grads=[behind(grad) for grad in given.grads])
    if given.weights is not None:
        moved = replace(moved, weights=[behind(weight) for weight in given.weights])
    moved.accumulate(acc, velocity)
    assert_same_bits(acc, wanted_acc)
    if wanted_velocity is not None:
        assert_same_bits(velocity, wanted_velocity)


def test_any_alignment() -> None:
    given = bucket([130, 7], torch.float32, "momentum")
    wanted, _ = given.sums()
    for offset in (1, 2, 4, 63):
        acc, velocity = misaligned(flat(137, torch.float32), offset), misaligned(flat(137, torch.float32), offset)
        moved = given.moved(partial(misaligned, offset=offset))
        moved.accumulate(acc, velocity)
        assert np.array_equal(acc, wanted.numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_in_place(kind: str) -> None:
    given = bucket([1000, 65], torch.float32, kind)
    acc, velocity = given.sums()
    residual = flat(1065, torch.float32) if given.residual is None else given.residual
    kept = flat(1065, torch.float32) if given.velocity is None else given.velocity
    given.accumulate(residual, kept)
    assert_same_bits(residual, acc)
    if velocity is not None:
        assert_same_bits(kept, velocity)


@pytest.mark.parametrize("nesterov", [False, True])
def test_no_old_velocity_is_zeros(nesterov: bool) -> None:
    grads = [torch.randn(70), torch.randn(3)]
    accs, velocities = [torch.empty(73) for _ in range(2)], [torch.empty(73) for _ in range(2)]
    for acc, velocity, old in zip(accs, velocities, (None, torch.zeros(73)), strict=True):
        kernels.accumulate(acc, None, grads, momentum=kernels.Momentum(velocity, old, 0.9, nesterov))
    assert_same_bits(accs[0], accs[1])
    assert_same_bits(velocities[0], velocities[1])


def test_one_array_may_be_its_own_sum() -> None:
    grad, residual = torch.randn(1001), torch.randn(1001)
    wanted = residual + grad * 0.5
    finite = kernels.accumulate(grad, residual, grad, 0.5)
    assert torch.equal(grad, wanted)
    assert finite.shape == ()


@pytest.mark.parametrize("scale", [2.0, -0.5, 1e-30])
def test_norms_are_brought_down(scale: float) -> None:
    grads = [torch.randn(4000), torch.zeros(40), torch.full((9,), 1e-3), torch.empty(0)]
    acc = torch.empty(4049)
    finite = kernels.accumulate(acc, None, grads, scale, clip=3.0)
    for part, grad in zip(torch.split(acc, [4000, 40, 9, 0]), grads, strict=True):
        wanted = grad.double() * scale
        wanted *= min(1.0, 3.0 / max(float(wanted.norm()), 1e-300))
        torch.testing.assert_close(part.double(), wanted, rtol=1e-6, atol=0.0)
    assert finite.tolist() == [True] * 4


def test_clipping_hides_nothing() -> None:
    grads = [torch.ones(40), torch.ones(40), torch.ones(40)]
    grads[0][3], grads[1][4] = torch.inf, torch.nan
    finite = kernels.accumulate(torch.empty(120), None, grads, 2.0, clip=1.0)
    assert finite.tolist() == [False, False, True]


BAD: dict[str, dict[str, Any]] = {
    "grads[1] has dtype float16, wanted float32 as grads[0]": {"grads": [torch.ones(2), torch.ones(1).half()]},
    "grads[0] has dtype int32": {"grads": [torch.ones(3).int()]},
    "acc has 3 elements, wanted 4 as all grads": {"grads": [torch.ones(4)]},
    "acc has dtype float32, wanted float64": {"grads": [torch.ones(3).double()]},
    "residual has 2 elements, wanted 3 as acc": {"residual": torch.ones(2)},
    "residual has dtype float64, wanted float32 as acc": {"residual": torch.ones(3).double()},
    "clip is 0.0, wanted a finite number above 0": {"clip": 0.0},
    "clip is nan, wanted a finite number above 0": {"clip": math.nan},
    "clip is 'big'": {"clip": "big"},
    "weights has 1 elements, wanted 2: one per gradient": {"decay": kernels.Decay([torch.ones(2)], 0.1)},
    "weights[1] has 2 elements, wanted 1 as its gradient": {"decay": kernels.Decay([torch.ones(2)] * 2, 0.1)},
    "velocity has 2 elements, wanted 3 as acc": {"momentum": kernels.Momentum(torch.ones(2), None, 0.9)},
    "old_velocity has 4 elements, wanted 3 as acc": {"momentum": kernels.Momentum(torch.ones(3), torch.ones(4), 0.9)},
    "old_velocity without velocity": {"momentum": kernels.Momentum(None, torch.ones(3), 0.9)},
    "scale has 2 elements, wanted 1": {"scale": torch.ones(2)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message: str) -> None:
    arguments: dict[str, Any] = {"residual": None, "grads": [torch.ones(2), torch.ones(1)], **BAD[message]}
    acc = torch.zeros(3)
    with pytest.raises((TypeError, ValueError)) as raised:
        kernels.accumulate(acc, **arguments)
    assert message in str(raised.value)
    assert not acc.any()


@pytest.mark.pairwise
@requires_gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu(gpu: Gpu, dtype: torch.dtype, kind: str) -> None:
    check_on_gpu(gpu, bucket(SIZES, dtype, kind))
    check_on_gpu(gpu, bucket([2049], dtype, kind, special=True))


@requires_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_gpu_alignments(gpu: Gpu, dtype: torch.dtype) -> None:
    for sizes in ([0], [1], [511], [512], [513], [1030, 0, 1021]):
        check_on_gpu(gpu, bucket(sizes, dtype, "momentum"))
    for gap, flat_gap in ((1, 1), (3, 0), (0, 3), (2, 2), (4, 4)):
        check_on_gpu(gpu, bucket([1030, 5, 1021], dtype, "nesterov", gap=gap), gap=flat_gap)


@requires_gpu
def test_gpu_scratch_is_reused(gpu: Gpu) -> None:
    scratch = kernels.Scratch()
    sizes = torch.randint(0, 9, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    given = bucket(sizes, torch.bfloat16, "weights")
    moved = given.moved(gpu.put)
    acc, velocity = flat(given.size, torch.float32), flat(given.size, torch.float32)
    given.accumulate(acc, velocity)
    for _ in range(3):  # the second time the table is there already
        gpu_acc = gpu.garbage(given.size, torch.float32)
        moved.accumulate(gpu_acc, None, scratch)
        assert_same_bits(gpu.get(gpu_acc), acc)
    check_on_gpu(gpu, bucket([7], torch.float32, "bare"), scratch=scratch)


@requires_gpu
def test_gpu_says_which_gradient_is_not_finite(gpu: Gpu) -> None:
    for bad in (torch.inf, -torch.inf, torch.nan):
        grads = [torch.ones(600), torch.ones(0), torch.ones(7), torch.ones(1300)]
        grads[2][6] = bad
        finite = kernels.accumulate(gpu.garbage(1907, torch.float32), None, gpu.puts(grads))
        assert gpu.get(finite).tolist() == [True, True, False, True]
        finite = kernels.accumulate(gpu.garbage(7, torch.float32), None, gpu.put(grads[2]))
        assert not gpu.get(finite).item()


@requires_gpu
def test_gpu_reads_scale_on_the_device(gpu: Gpu) -> None:
    given = bucket(SIZES, torch.float16, "residual")
    scale = torch.tensor(0.37)
    acc = flat(given.size, torch.float32)
    replace(given, scale=scale.item()).accumulate(acc, None)
    out = gpu.garbage(given.size, torch.float32)
    replace(given.moved(gpu.put), scale=gpu.put(scale)).accumulate(out, None)
    assert_same_bits(gpu.get(out), acc)


@requires_gpu
def test_gpu_in_place(gpu: Gpu) -> None:
    given = bucket(SIZES, torch.float32, "momentum", gap=1)
    acc, velocity = given.sums()
    moved = given.moved(gpu.put)
    moved.accumulate(moved.residual, moved.velocity)
    assert_same_bits(gpu.get(moved.residual), acc)
    assert velocity is not None
    assert_same_bits(gpu.get(moved.velocity), velocity)
    grad = gpu.put(given.grads[4])
    kernels.accumulate(grad, None, grad, 0.5)
    assert_same_bits(gpu.get(grad), given.grads[4] * 0.5)


@requires_gpu
def test_gpu_no_old_velocity(gpu: Gpu) -> None:
    grads = [torch.randn(700), torch.randn(3)]
    acc, velocity = torch.empty(703), torch.empty(703)
    gpu_acc, gpu_velocity = gpu.garbage(703, torch.float32), gpu.garbage(703, torch.float32)
    kernels.accumulate(acc, None, grads, momentum=kernels.Momentum(velocity, None, 0.9))
    kernels.accumulate(gpu_acc, None, gpu.puts(grads), momentum=kernels.Momentum(gpu_velocity, None, 0.9))
    assert_same_bits(gpu.get(gpu_acc), acc)
    assert_same_bits(gpu.get(gpu_velocity), velocity)
