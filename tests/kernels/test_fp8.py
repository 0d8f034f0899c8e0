"""FP8 codes of quantize and dequantize, against torch's dtypes and against exact references in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pycomm import kernels
from pycomm.kernels import Quantization
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits, simd
from tests.kernels.test_quantize import SEED, SIZES, random_numbers, seed_array, some

__all__ = ["gpu", "simd"]

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
MANTISSA = {"e4m3": 3, "e5m2": 2}
LEAST = {"e4m3": -6, "e5m2": -14}
ALL_CODES = torch.arange(256, dtype=torch.uint8)
each_element = pytest.mark.parametrize("element", DTYPES)
each_seed = pytest.mark.parametrize("seed", [None, SEED])


def magnitudes(element: str) -> np.ndarray:
    """Return what the finite codes from 0 on stand for, in float64."""
    values = ALL_CODES[:128].view(DTYPES[element]).double()
    return values[values.isfinite()].numpy()


def scales_of(x: np.ndarray, config: Quantization) -> np.ndarray:
    """Return the smallest powers of two that bring blocks to the largest number."""
    scales = []
    for at in range(0, len(x), config.block):
        most = np.abs(x[at : at + config.block].astype(np.float64)).max()
        if not most <= 1.75 * 2.0**127:
            scales.append(np.inf)
            continue
        fitting = (2.0**k for k in range(-200, 128) if most <= LARGEST[config.element] * 2.0**k)
        scale = next(fitting)
        scales.append(scale if scale >= 2.0**-100 else 0.0)
    return np.array(scales, np.float32)


def nearest(x: np.ndarray, scale: np.ndarray | np.float32, element: str) -> np.ndarray:
    """Return the codes of ``x / scale``, rounded to the nearest in float64, ties to even."""
    table = magnitudes(element)
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.where(scale == 0, 0.0, np.abs(x.astype(np.float64)) / scale)
    above = np.searchsorted(table, level).clip(1, len(table) - 1)
    low, high = level - table[above - 1], table[above] - level
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (code | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def by_chance(x: np.ndarray, scale: np.ndarray, element: str, seed: tuple[int, int]) -> np.ndarray:
    """Return the codes of ``x / scale``, rounded up or down in float32, as csrc/kernels/quantize.h says."""
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.where(scale == 0, np.float32(0), np.abs(x) * (np.float32(1) / scale)).astype(np.float32)
    exponent = np.frexp(level.astype(np.float64))[1] - 1
    exponent = np.where(level == 0, LEAST[element], exponent).clip(LEAST[element])
    unit = np.ldexp(np.float64(1), exponent - MANTISSA[element])
    units = np.trunc((level / unit).astype(np.float32) + random_numbers(seed, len(x)))
    value = np.minimum(units * unit, LARGEST[element])
    return (np.searchsorted(magnitudes(element), value) | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def critical(element: str) -> torch.Tensor:
    """Return numbers on, between and next to all borders, in blocks that hold the largest one: their scales are 1."""
    table = magnitudes(element)
    middles = (table[1:] + table[:-1]) / 2
    borders = np.concatenate([table, middles, (table[1:] + middles) / 2]).astype(np.float32)
    numbers = np.concatenate([borders, np.nextafter(borders, np.float32(0)), np.nextafter(borders, np.float32(1e9))])
    numbers = np.concatenate([numbers, 2.0 ** np.arange(-149.0, -9.0), [1e-45, 1e-40, 3e-39]]).astype(np.float32)
    numbers = numbers[numbers <= LARGEST[element]]
    dense = np.random.default_rng(1).integers(0, 0x7F800000, 20_000, np.uint32).view(np.float32)
    numbers = np.concatenate([numbers, dense[dense <= LARGEST[element]]])
    numbers = np.concatenate([numbers, -numbers])
    rows = np.full((-(-len(numbers) // 63), 64), LARGEST[element], np.float32)
    rows[:, 1:].flat[: len(numbers)] = numbers
    return torch.from_numpy(rows.ravel())


@pytest.mark.usefixtures("simd")
@each_element
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 0.375, 2.0**100])
def test_every_code_is_torchs(element: str, scale: float) -> None:
    out = torch.full((256,), 77.0)
    kernels.dequantize([torch.full((4,), scale)], [ALL_CODES], Quantization(64, element=element), out)
    wanted = ALL_CODES.view(DTYPES[element]).float() * scale
    assert_same_bits(out, 0.0 + wanted)  # a sum


@pytest.mark.usefixtures("simd")
@each_element
def test_rounding_is_torchs_and_exact(element: str) -> None:
    x, config = critical(element), Quantization(64, element=element)
    exact = nearest(x.numpy(), np.float32(1), element)
    assert torch.equal(x.to(DTYPES[element]).view(torch.uint8), torch.from_numpy(exact))
    for power in (0, 1, -37, -91, 90):
        scales, codes = kernels.quantize(x * 2.0**power, config)
        assert bool((scales == 2.0**power).all())
        kept = torch.ones_like(x, dtype=torch.bool) if power == 0 else x.abs() >= 2.0**-30  # may have been rounded
        assert torch.equal(codes[kept], torch.from_numpy(exact)[kept])


def check(x: torch.Tensor, config: Quantization, seed: tuple[int, int] | None) -> None:
    left = torch.full_like(x, 77.0)
    scales, codes = kernels.quantize(x, config, seed=seed_array(seed), remainder=left)
    assert np.array_equal(scales.numpy(), scales_of(x.numpy(), config))
    each = scales.numpy().repeat(config.block)[: len(x)]
    element = config.element
    wanted = nearest(x.numpy(), each, element) if seed is None else by_chance(x.numpy(), each, element, seed)
    assert_same_bits(codes, torch.from_numpy(wanted))
    values = codes.view(DTYPES[element]).float()
    assert bool(values.isfinite().all())
    assert_same_bits(left, x - values * torch.from_numpy(each))


@pytest.mark.usefixtures("simd")
@each_element
@each_seed
def test_against_numpy(element: str, seed: tuple[int, int] | None) -> None:
    for block in (64, 128, 4096):
        for count in (*SIZES, 127, 129, 4097):
            check(some(count), Quantization(block, element=element), seed)
    check(critical(element), Quantization(64, element=element), seed)


@pytest.mark.usefixtures("simd")
@each_element
def test_scales_at_their_borders(element: str) -> None:
    """Magnitudes of 1.75 times a power of two, and next to them, up to the largest float32 and down to denormals."""
    border = np.ldexp(np.float32(1.75), np.arange(-148, 128)).astype(np.float32)
    x = np.stack([np.nextafter(border, np.float32(0)), border, np.nextafter(border, np.float32(np.inf))])
    rows = torch.zeros(x.size, 64)
    rows[:, 5] = torch.from_numpy(x.ravel())
    config = Quantization(64, element=element)
    scales, _ = kernels.quantize(rows.flatten(), config)
    assert_same_bits(scales, torch.from_numpy(scales_of(rows.flatten().numpy(), config)))
    assert scales[-1].isinf()


@pytest.mark.usefixtures("simd")
@each_element
@each_seed
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 1.76 * 2.0**127])
def test_what_is_not_finite_spoils_its_block_alone(element: str, seed: tuple[int, int] | None, bad: float) -> None:
    x = torch.ones(300)
    x[100] = bad
    scales, codes = kernels.quantize(x, Quantization(64, element=element), seed=seed_array(seed))
    assert scales.isfinite().tolist() == [True, False, True, True, True]
    assert bool((torch.cat([codes[:64], codes[128:]]) == codes[0]).all())


@each_element
def test_stochastic_rounding_has_no_bias(element: str) -> None:
    x = torch.cat([torch.linspace(-448.0, 448.0, 127), torch.full((1,), LARGEST[element])])
    config, total = Quantization(128, element=element), torch.zeros(128, dtype=torch.float64)
    for step in range(2000):
        scales, codes = kernels.quantize(x, config, seed=torch.tensor([9, step]))
        out = torch.empty(128)
        kernels.dequantize([scales], [codes], config, out)
        total += out
    unit = 448.0 / 2 ** (MANTISSA[element] + 1)
    assert (total / 2000 - x).abs().max() < 4.5 * unit / 2000**0.5


BAD = {
    "element is 'e3m4', wanted 'int', 'e4m3' or 'e5m2'": Quantization(element="e3m4"),
    "bits is 4, levels is 7 and norm is 'max' with element 'e4m3', wanted their defaults": Quantization(
        64, 7, 4, element="e4m3"
    ),
    "levels is 100 and": Quantization(64, 100, element="e5m2"),
    "norm is 'euclidean' with element": Quantization(norm="euclidean", element="e5m2"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_settings(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.quantize(torch.ones(10), BAD[message])


@requires_gpu
@each_element
@each_seed
@pytest.mark.parametrize("block", [64, 128, 4096])
def test_gpu(gpu: Gpu, element: str, seed: tuple[int, int] | None, block: int) -> None:
    config = Quantization(block, element=element)
    for x in (*(some(count + gap)[gap:] for count, gap in ((0, 0), (1, 0), (67, 1), (5003, 3))), critical(element)):
        left = torch.full((len(x),), 77.0)
        scales, codes = kernels.quantize(x, config, seed=seed_array(seed), remainder=left)
        on_gpu = gpu.put(x)
        numbers = None if seed is None else gpu.put(torch.tensor(seed))
        there = kernels.quantize(on_gpu, config, seed=numbers, remainder=on_gpu)
        assert_same_bits(gpu.get(there[0]), scales)
        assert_same_bits(gpu.get(there[1]), codes)
        assert_same_bits(gpu.get(on_gpu), left)


@requires_gpu
@each_element
def test_gpu_every_code(gpu: Gpu, element: str) -> None:
    config, wanted, out = Quantization(64, element=element), torch.empty(256), gpu.garbage(256, torch.float32)
    scales = torch.tensor([1.0, 2.0**-100, 0.375, 2.0**100])
    kernels.dequantize([scales], [ALL_CODES], config, wanted)
    kernels.dequantize([gpu.put(scales)], [gpu.put(ALL_CODES)], config, out)
    assert_same_bits(gpu.get(out), wanted)
