"""requantize and accumulate_quantized, against the kernels that they stand for, and against sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pycomm import kernels
from pycomm.kernels import Quantization
from tests.kernels.bucket import KINDS, Bucket, bucket, flat
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits, misaligned, simd
from tests.kernels.test_quantize import CONFIGS, SEED, seed_array, some

__all__ = ["gpu", "simd"]

ALL_CONFIGS = [
    *CONFIGS,
    Quantization(192, 7, 4, "euclidean"),
    Quantization(2048, 127, 8, "euclidean"),
    Quantization(128, element="e4m3"),
    Quantization(2112, element="e4m3"),
    Quantization(256, element="e5m2"),
]
SIZES = [0, 1, 63, 64, 65, 127, 129, 257, 4095, 5003]
each_config = pytest.mark.parametrize("config", ALL_CONFIGS)
each_seed = pytest.mark.parametrize("seed", [None, SEED])


def contributions(config: Quantization, count: int, ranks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parts = [kernels.quantize(some(count, seed), config) for seed in range(ranks)]
    return [scales for scales, _ in parts], [codes for _, codes in parts]


def outputs(config: Quantization, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full((config.code_bytes(count),), 77, dtype=torch.uint8)
    return torch.full((config.num_blocks(count),), 77.0), codes


def expected(
    parts: tuple[Any, Any], config: Quantization, count: int, seed: tuple[int, int] | None, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales, codes and what the remainder becomes, by the two kernels one after the other."""
    total, left = torch.empty(count), torch.empty(count)
    kernels.dequantize(*parts, config, total)
    scales, codes = kernels.quantize(total, config, seed=seed_array(seed), remainder=left)
    return scales, codes, before + left


@pytest.mark.pairwise
@pytest.mark.usefixtures("simd")
@each_config
@each_seed
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_same_as_two_kernels(config: Quantization, seed: tuple[int, int] | None, ranks: int) -> None:
    for count in SIZES:
        parts, out, rest = contributions(config, count, ranks), outputs(config, count), some(count, 99)
        scales, codes, left = expected(parts, config, count, seed, rest)
        kernels.requantize(*parts, config, out, seed=seed_array(seed), remainder=rest)
        for found, wanted in zip((*out, rest), (scales, codes, left), strict=True):
            assert_same_bits(found, wanted)
        out = outputs(config, count)
        kernels.requantize(*parts, config, out, seed=seed_array(seed), count=count)
        assert_same_bits(out[0], scales)
        assert_same_bits(out[1], codes)


@pytest.mark.usefixtures("simd")
@each_config
def test_the_sum_and_its_error(config: Quantization) -> None:
    """What is sent and what is left make up the sum of what came, in float64."""
    count, ranks = 5003, 4
    parts, out, rest = contributions(config, count, ranks), outputs(config, count), torch.zeros(count)
    kernels.requantize(*parts, config, out, remainder=rest)
    wanted, one = np.zeros(count), torch.empty(count)
    for scales, codes in zip(*parts, strict=True):
        kernels.dequantize([scales], [codes], config, one)
        wanted += one.double().numpy()
    kernels.dequantize([out[0]], [out[1]], config, one)
    tolerance = 1e-6 * np.abs(wanted).max()
    assert np.abs(one.double().numpy() + rest.double().numpy() - wanted).max() <= tolerance
    each = out[0].numpy().repeat(config.block)[:count]
    half = {"int": 0.501 * each, "e4m3": 16 * each, "e5m2": 4096 * each}[config.element]
    if config.norm == "max":
        assert bool((np.abs(rest.numpy()) <= half).all())


@pytest.mark.usefixtures("simd")
def test_unaligned_codes() -> None:
    config, count = Quantization(64, 7, 4), 333
    scales, codes = contributions(config, count, 3)
    out, moved = outputs(config, count), outputs(config, count)
    kernels.requantize(scales, codes, config, out, count=count)
    kernels.requantize(scales, [misaligned(code, 1) for code in codes], config, moved, count=count)
    assert_same_bits(moved[0], out[0])
    assert_same_bits(moved[1], out[1])


def test_threads() -> None:
    config, count = Quantization(128, element="e4m3"), 3_000_001
    parts, out, rest = contributions(config, count, 3), outputs(config, count), some(count)
    scales, codes, left = expected(parts, config, count, SEED, rest)
    kernels.set_num_threads(2)
    try:
        kernels.requantize(*parts, config, out, seed=torch.tensor(SEED), remainder=rest)
    finally:
        kernels.set_num_threads(None)
    for found, wanted in zip((*out, rest), (scales, codes, left), strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("config", [Quantization(64, 7, 4), Quantization(64, element="e4m3")])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_scale_that_is_not_finite_spoils_its_block_alone(config: Quantization, bad: float) -> None:
    x = torch.ones(300)
    (scales, codes), out = kernels.quantize(x, config), outputs(config, 300)
    scales[1] = bad
    kernels.requantize([scales, torch.ones(5)], [codes, codes], config, out, count=300)
    assert out[0].isfinite().tolist() == [True, False, True, True, True]


def test_what_it_refuses() -> None:
    config = Quantization(64)
    parts, out = contributions(config, 100, 2), outputs(config, 100)
    cases: list[tuple[str, Any]] = [
        ("count is None, wanted the number of elements", lambda: kernels.requantize(*parts, config, out)),
        ("count is -1, wanted at least 0", lambda: kernels.requantize(*parts, config, out, count=-1)),
        ("scales[0] has 2 elements, wanted 4", lambda: kernels.requantize(*parts, config, out, count=200)),
        (
            "out[0] has 1 elements, wanted 2",
            lambda: kernels.requantize(*parts, config, (out[0][:1], out[1]), count=100),
        ),
        ("out[1] has 99 elements", lambda: kernels.requantize(*parts, config, (out[0], out[1][:99]), count=100)),
        (
            "remainder has 99 elements, wanted 100",
            lambda: kernels.requantize(*parts, config, out, remainder=torch.ones(99), count=100),
        ),
        ("codes has 1 elements, wanted 2", lambda: kernels.requantize(parts[0], parts[1][:1], config, out, count=100)),
        ("out[1] overlaps codes[0]", lambda: kernels.requantize(*parts, config, (out[0], parts[1][0]), count=100)),
    ]
    for message, call in cases:
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert message in str(raised.value)


@pytest.mark.pairwise
@requires_gpu
@each_config
@each_seed
def test_gpu(gpu: Gpu, config: Quantization, seed: tuple[int, int] | None) -> None:
    scratch = kernels.Scratch()
    for count, gap, ranks in ((0, 0, 2), (1, 0, 6), (67, 1, 17), (300, 0, 1), (5003, 0, 5), (4096, 4, 4)):
        parts = contributions(config, count, ranks)
        rest = some(count, 99)
        scales, codes, left = expected(parts, config, count, seed, rest)
        out = gpu.garbage(len(scales), torch.float32), gpu.put(torch.zeros(len(codes) + gap, dtype=torch.uint8)[gap:])
        moved = [torch.cat([torch.zeros(gap, dtype=torch.uint8), code])[gap:] for code in parts[1]]
        numbers, there = None if seed is None else gpu.put(torch.tensor(seed)), gpu.put(rest)
        kernels.requantize(
            *(gpu.puts(parts[0]), gpu.puts(moved), config, out), seed=numbers, remainder=there, scratch=scratch
        )
        if config.norm == "max":  # sums of squares have another order there
            assert_same_bits(gpu.get(out[0]), scales)
            assert_same_bits(gpu.get(out[1]), codes)
            assert_same_bits(gpu.get(there), left)
        else:
            assert torch.allclose(gpu.get(out[0]), scales, rtol=1e-5, atol=0)


def accumulated_then_quantized(
    given: Bucket, config: Quantization, cuts: list[tuple[int, int]], seed: Any
) -> tuple[list[Any], torch.Tensor, torch.Tensor, Any]:
    """Return scales and codes of each part, the sums with what is left, the velocity and ``finite``; by two kernels."""
    acc, velocity = flat(given.size, torch.float32), flat(given.size, torch.float32)
    finite = given.accumulate(acc, velocity)
    parts = [acc[begin:end] for begin, end in cuts]
    return [kernels.quantize(part, config, seed=seed, remainder=part) for part in parts], acc, velocity, finite


def parts_of(config: Quantization, cuts: list[tuple[int, int]], seed: Any, put: Any = lambda x: x) -> list[Any]:
    return [(begin, end, seed, *map(put, outputs(config, end - begin))) for begin, end in cuts]


@pytest.mark.pairwise
@pytest.mark.usefixtures("simd")
@each_config
@each_seed
@pytest.mark.parametrize("kind", KINDS)
def test_accumulate_quantized_is_accumulate_and_then_quantize(
    config: Quantization, seed: tuple[int, int] | None, kind: str
) -> None:
    sizes = [5, 4096, 700, 9001]
    given, total = bucket(sizes, torch.float32, kind), sum(sizes)
    for cuts in ([(0, total)], [(0, 5000), (5000, 5000), (5000, total)], [(64, 6001), (7000, 7003)], []):
        coded, acc, velocity, finite = accumulated_then_quantized(given, config, cuts, seed_array(seed))
        sums, new = flat(given.size, torch.float32), flat(given.size, torch.float32)
        parts = parts_of(config, cuts, seed_array(seed))
        arguments = given.residual, given.grads, given.scale, config, parts
        told = kernels.accumulate_quantized(sums, *arguments, **given.options(new))
        assert told.tolist() == finite.tolist()
        assert_same_bits(sums, acc)
        if given.velocity is not None:
            assert_same_bits(new, velocity)
        for (_, _, _, *found), wanted in zip(parts, coded, strict=True):
            for one, other in zip(found, wanted, strict=True):
                assert_same_bits(one, other)


@requires_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulate_quantized_on_a_gpu(gpu: Gpu, dtype: torch.dtype) -> None:
    config, cuts = Quantization(128, 7, 4), [(0, 4000), (4100, 5005)]
    given = bucket([5, 5000], dtype, "residual")
    coded, acc, _, finite = accumulated_then_quantized(given, config, cuts, None)
    moved, sums = given.moved(gpu.put), gpu.put(flat(given.size, torch.float32))
    parts = parts_of(config, cuts, None, gpu.put)
    arguments = moved.residual, moved.grads, moved.scale, config, parts
    told = kernels.accumulate_quantized(sums, *arguments, **moved.options(None))
    assert gpu.get(told).tolist() == finite.tolist()
    assert_same_bits(gpu.get(sums), acc)
    for (_, _, _, *found), wanted in zip(parts, coded, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert_same_bits(gpu.get(one), other)


def test_accumulate_quantized_in_threads_and_where_nothing_is_kept() -> None:
    config, sizes = Quantization(block=256), [1_500_000, 3, 999_999]
    given, cuts = bucket(sizes, torch.float16, "residual"), [(0, 1_000_001), (1_000_001, sum(sizes))]
    coded, acc, _, finite = accumulated_then_quantized(given, config, cuts, None)
    kernels.set_num_threads(2)
    try:
        for keeps in (True, False):
            sums, parts = flat(given.size, torch.float32), parts_of(config, cuts, None)
            arguments = given.residual, given.grads, given.scale, config, parts
            told = kernels.accumulate_quantized(sums, *arguments, keeps=keeps, **given.options(None))
            assert told.tolist() == finite.tolist()
            if keeps:
                assert_same_bits(sums, acc)
            for (_, _, _, *found), wanted in zip(parts, coded, strict=True):
                for one, other in zip(found, wanted, strict=True):
                    assert_same_bits(one, other)
    finally:
        kernels.set_num_threads(None)


@pytest.mark.parametrize(
    ("cuts", "says"),
    [
        ([(0, 100), (50, 150)], r"parts\[1\] is from 50 to 150, wanted elements of acc, after the parts before it"),
        ([(0, 129)], r"parts\[0\] is from 0 to 129"),
        ([(-1, 5)], r"parts\[0\] is from -1 to 5"),
    ],
)
def test_bad_parts(cuts: list[tuple[int, int]], says: str) -> None:
    config, given = Quantization(64), bucket([128], torch.float32, "residual")
    with pytest.raises(ValueError, match=says):
        kernels.accumulate_quantized(
            flat(128, torch.float32), given.residual, given.grads, 1.0, config, parts_of(config, cuts, None)
        )
