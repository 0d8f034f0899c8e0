"""quantize and dequantize against the definition in csrc/kernels/quantize.h, written in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pycomm import kernels
from pycomm.kernels import Quantization
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits, misaligned, simd

__all__ = ["gpu", "simd"]

CONFIGS = [
    Quantization(),
    Quantization(64, 7, 4),
    Quantization(128, 1, 2),
    Quantization(192, 3, 8),
    Quantization(2112, 5, 4),
    Quantization(4096, 127, 8),
]
SIZES = [0, 1, 3, 63, 64, 65, 255, 257, 1000, 5003]
SEED = (123_456_789_012_345, -7)


def scrambled(x: np.ndarray) -> np.ndarray:
    x = x ^ x >> np.uint32(16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ x >> np.uint32(15)
    x = x * np.uint32(0x846CA68B)
    mixed: np.ndarray = x ^ x >> np.uint32(16)
    return mixed


def random_numbers(seed: tuple[int, int], count: int) -> np.ndarray:
    parts = []
    for j, number in enumerate(seed):
        halves = np.array([number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF], np.uint64).astype(np.uint32)
        added = halves + np.array([0x9E3779B9 * (j + 1) & 0xFFFFFFFF, 0x85EBCA6B], np.uint32)
        parts.append(scrambled(added[:1]) ^ scrambled(added[1:]))
    x = scrambled(np.arange(count, dtype=np.uint32) ^ parts[0])
    return (scrambled(x + parts[1]) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def reference(
    x: np.ndarray, config: Quantization, seed: tuple[int, int] | None, scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The codes as whole numbers, and the remainders, given the scales."""
    scale = scales.repeat(config.block)[: len(x)]
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    level = np.abs(x * inverse)
    level = np.rint(level) if seed is None else np.trunc(level + random_numbers(seed, len(x)))
    code = np.copysign(np.minimum(level, np.float32(config.levels)), x)
    return code.astype(np.int64), x - code * scale


def scales_of(x: np.ndarray, config: Quantization) -> np.ndarray:
    starts = np.arange(0, len(x), config.block)
    if config.norm == "max":
        norms = np.array([np.abs(x[at : at + config.block]).max() for at in starts], np.float32)
    else:
        norms = np.array(
            [np.sqrt((x[at : at + config.block].astype(np.float64) ** 2).sum()) for at in starts], np.float32
        )
    scales = norms * (np.float32(1) / np.float32(config.levels))
    return np.where(scales < np.float32(2.0**-100), np.float32(0), scales)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    per_byte = 8 // bits
    padded = np.zeros(-(-len(codes) // per_byte) * per_byte, np.int64)
    padded[: len(codes)] = codes & ((1 << bits) - 1)
    shifts = np.arange(per_byte) * bits
    joined: np.ndarray = (padded.reshape(-1, per_byte) << shifts).sum(1)
    return joined.astype(np.uint8)


def some(count: int, seed: int = 1) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    x[count // 2 : count // 2 + 70] *= 1e-20
    x[count // 3 :: 97] = -0.0
    return x


def seed_array(seed: tuple[int, int] | None) -> torch.Tensor | None:
    return None if seed is None else torch.tensor(seed)


def check(x: Any, config: Quantization, seed: tuple[int, int] | None) -> None:
    """On the CPU."""
    as_numpy = np.asarray(x)
    left = np.full(len(x), 77, np.float32)
    scales, codes = kernels.quantize(x, config, seed=seed_array(seed), remainder=left)
    scales, codes = np.asarray(scales), np.asarray(codes)
    wanted = scales_of(as_numpy, config)
    if config.norm == "max":
        assert np.array_equal(scales, wanted)
    else:
        assert np.allclose(scales, wanted, rtol=1e-5, atol=0)
    numbers, remainder = reference(as_numpy, config, seed, scales)
    assert np.array_equal(codes, packed(numbers, config.bits))
    assert_same_bits(torch.from_numpy(left), torch.from_numpy(remainder))
    assert np.abs(left).max(initial=0) <= scales.max(initial=0) * (1.0 if seed else 0.501)
    out = np.full(len(x), 77, np.float32)
    kernels.dequantize([scales], [codes], config, out)
    assert np.array_equal(out, (numbers * scales.repeat(config.block)[: len(x)]).astype(np.float32))


@pytest.mark.pairwise
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("norm", ["max", "euclidean"])
@pytest.mark.parametrize("seed", [None, SEED])
def test_against_numpy(config: Quantization, norm: str, seed: tuple[int, int] | None) -> None:
    config = Quantization(config.block, config.levels, config.bits, norm)
    for count in SIZES:
        check(some(count), config, seed)


@pytest.mark.usefixtures("simd")
@given(
    count=st.integers(0, 700),
    offset=st.sampled_from([0, 4, 8, 60]),
    numbers=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2),
)
def test_any_seed_and_alignment(count: int, offset: int, numbers: tuple[int, int]) -> None:
    check(misaligned(some(count), offset), Quantization(64, 7, 4), numbers)


def test_halves_go_to_the_even_level() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 7.0, -7.0, 0.49])
    _, codes = kernels.quantize(x, Quantization(64, 7, 8))
    assert codes.view(torch.int8).tolist() == [0, 2, 2, 0, -2, 7, -7, 0]


def test_tiny_blocks_are_zeros() -> None:
    x = torch.cat([torch.full((64,), 2.0**-95), torch.full((64,), -(2.0**-92)), torch.zeros(5)])
    left = torch.empty(133)
    scales, codes = kernels.quantize(x, Quantization(64, 127, 8), remainder=left)
    assert scales.tolist() == [0.0, (torch.tensor(1 / 127) * 2.0**-92).item(), 0.0]
    assert codes.view(torch.int8).tolist() == [0] * 64 + [-127] * 64 + [0] * 5
    assert_same_bits(left[:64], x[:64])


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_spoils_its_unit_alone(bad: float) -> None:
    x = torch.ones(300)
    x[100] = bad
    for norm in ("max", "euclidean"):
        scales, _ = kernels.quantize(x, Quantization(64, 7, 4, norm))
        assert scales.isfinite().tolist() == [True, False, True, True, True]


def test_stochastic_rounding_has_no_bias() -> None:
    x = torch.linspace(-1.0, 1.0, 256)
    config = Quantization(256, 1, 2)
    total = torch.zeros(256, dtype=torch.float64)
    for step in range(2000):
        scales, codes = kernels.quantize(x, config, seed=torch.tensor([9, step]))
        out = torch.empty(256)
        kernels.dequantize([scales], [codes], config, out)
        total += out
    assert (total / 2000 - x).abs().max() < 4 * 0.5 / 2000**0.5  # four standard deviations
    assert abs((total / 2000 - x).mean()) < 4 * 0.5 / (2000 * 256) ** 0.5


def test_threads_in_place() -> None:
    x = some(3_000_001)
    config = Quantization(256, 7, 4)
    wanted, (scales, codes) = x.clone(), kernels.quantize(x, config, seed=torch.tensor(SEED))
    kernels.set_num_threads(2)
    try:
        again = kernels.quantize(x, config, seed=torch.tensor(SEED), remainder=x)
        out = torch.empty_like(x)
        kernels.dequantize([scales, scales], [codes, codes], config, out, 0.5)
    finally:
        kernels.set_num_threads(None)
    assert torch.equal(again[0], scales)
    assert torch.equal(again[1], codes)
    assert torch.equal(wanted - out, x)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("config", CONFIGS)
def test_the_sum_of_several(config: Quantization) -> None:
    for count in SIZES:
        parts = [kernels.quantize(some(count, seed), config) for seed in range(5)]
        single = [torch.empty(count) for _ in parts]
        for (scales, codes), one in zip(parts, single, strict=True):
            kernels.dequantize([scales], [codes], config, one)
        out = torch.full((count,), 77.0)
        kernels.dequantize([scales for scales, _ in parts], [codes for _, codes in parts], config, out, 0.3)
        wanted = torch.zeros(count)
        for one in single:
            wanted = wanted + one
        assert_same_bits(out, wanted * torch.tensor(0.3))


BAD = {
    "block is 100, wanted a positive multiple of 64": Quantization(block=100),
    "block is 0, wanted": Quantization(block=0),
    "bits is 3, wanted 2, 4 or 8": Quantization(bits=3),
    "levels is 8, wanted 1 <= levels <= 7 with 4 bits": Quantization(64, 8, 4),
    "levels is 0, wanted 1 <= levels <= 127": Quantization(levels=0),
    "norm is 'mean', wanted 'max' or 'euclidean'": Quantization(norm="mean"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_settings(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.quantize(torch.ones(10), BAD[message], (torch.ones(1), torch.ones(10, dtype=torch.uint8)))


def test_bad_arrays() -> None:
    x, config = torch.ones(100), Quantization(64)
    scales, codes = kernels.quantize(x, config)
    cases: list[tuple[str, Any]] = [
        ("x has dtype float64", lambda: kernels.quantize(x.double(), config)),
        ("scales has 1 elements, wanted 2", lambda: kernels.quantize(x, config, (scales[:1], codes))),
        ("codes has 99 elements, wanted 100", lambda: kernels.quantize(x, config, (scales, codes[:99]))),
        ("codes has dtype int8", lambda: kernels.quantize(x, config, (scales, codes.view(torch.int8)))),
        ("seed has dtype int32, wanted int64", lambda: kernels.quantize(x, config, seed=torch.ones(2).int())),
        ("seed has 3 elements, wanted 2", lambda: kernels.quantize(x, config, seed=torch.ones(3).long())),
        ("remainder has 5 elements, wanted 100", lambda: kernels.quantize(x, config, remainder=x[:5])),
        ("scales[1] has 1 elements", lambda: kernels.dequantize([scales, scales[:1]], [codes] * 2, config, x)),
        ("codes[0] has 9 elements", lambda: kernels.dequantize([scales], [codes[:9]], config, x)),
        ("codes has 1 elements, wanted 2", lambda: kernels.dequantize([scales] * 2, [codes], config, x)),
        ("out has dtype float16", lambda: kernels.dequantize([scales], [codes], config, x.half())),
    ]
    for message, call in cases:
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert message in str(raised.value)


@pytest.mark.pairwise
@requires_gpu
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("seed", [None, SEED])
def test_gpu(gpu: Gpu, config: Quantization, seed: tuple[int, int] | None) -> None:
    for count, gap in ((0, 0), (1, 0), (67, 1), (300, 0), (1001, 3), (5003, 0)):
        x = some(count + gap)[gap:]
        left = torch.full((count,), 77.0)
        scales, codes = kernels.quantize(x, config, seed=seed_array(seed), remainder=left)
        on_gpu = gpu.put(x)
        out = gpu.garbage(len(scales), torch.float32), gpu.put(torch.zeros(len(codes) + gap, dtype=torch.uint8)[gap:])
        numbers = None if seed is None else gpu.put(torch.tensor(seed))
        kernels.quantize(on_gpu, config, out, seed=numbers, remainder=on_gpu)
        assert_same_bits(gpu.get(out[0]), scales)
        assert_same_bits(gpu.get(out[1]), codes)
        assert_same_bits(gpu.get(on_gpu), left)


@requires_gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_gpu_euclidean(gpu: Gpu, config: Quantization) -> None:
    config = Quantization(config.block, config.levels, config.bits, "euclidean")
    x = some(5003)
    left = gpu.garbage(5003, torch.float32)
    arrays = kernels.quantize(gpu.put(x), config, seed=gpu.put(torch.tensor(SEED)), remainder=left)
    scales, codes = gpu.get(arrays[0]).numpy(), gpu.get(arrays[1]).numpy()
    assert np.allclose(scales, scales_of(x.numpy(), config), rtol=1e-5, atol=0)
    numbers, remainder = reference(x.numpy(), config, SEED, scales)
    assert np.array_equal(codes, packed(numbers, config.bits))
    assert_same_bits(gpu.get(left), torch.from_numpy(remainder))


@requires_gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_gpu_the_sum_of_several(gpu: Gpu, config: Quantization) -> None:
    scratch = kernels.Scratch()
    scale = torch.tensor(0.3)
    for count, gap, num_parts in ((0, 0, 6), (1, 0, 6), (67, 1, 17), (5003, 3, 6), (2048, 0, 1)):
        parts = [kernels.quantize(some(count, seed), config) for seed in range(num_parts)]
        scales, codes = [scales for scales, _ in parts], [codes for _, codes in parts]
        wanted = torch.empty(count)
        kernels.dequantize(scales, codes, config, wanted, scale.item())
        out = gpu.put(torch.full((count + gap,), 77.0)[gap:])
        kernels.dequantize(gpu.puts(scales), gpu.puts(codes), config, out, gpu.put(scale), scratch=scratch)
        assert_same_bits(gpu.get(out), wanted)
