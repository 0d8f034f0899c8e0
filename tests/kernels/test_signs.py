"""pack_signs and unpack_signs against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pycomm import kernels
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits, interesting, misaligned, simd

__all__ = ["gpu", "simd"]

SIZES = [0, 1, 3, 15, 16, 31, 32, 33, 64, 511, 512, 513, 5003]


def words_of(x: np.ndarray) -> np.ndarray:
    bits = np.zeros(kernels.sign_words(len(x)) * 32, np.bool_)
    bits[: len(x)] = np.signbit(x)
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def signed(magnitude: float, words: np.ndarray, count: int) -> np.ndarray:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:count]
    return np.where(bits == 1, -np.float32(magnitude), np.float32(magnitude))


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("offset", [0, 4, 12])
def test_against_numpy(offset: int) -> None:
    for count in SIZES:
        x = misaligned(interesting(count, torch.float32, count), offset)
        left = misaligned(torch.zeros(count), offset)
        magnitude = np.array([0.7], np.float32)
        words = kernels.pack_signs(x, magnitude, remainder=left)
        assert np.array_equal(words, words_of(x))
        with np.errstate(invalid="ignore"):
            wanted = x - np.copysign(magnitude, x)
        assert_same_bits(torch.from_numpy(left), torch.from_numpy(wanted))
        assert np.array_equal(kernels.pack_signs(x, magnitude), words)
        out = misaligned(torch.zeros(count), offset)
        kernels.unpack_signs([words], [magnitude], out)
        assert np.array_equal(out, signed(0.7, words, count))


@pytest.mark.usefixtures("simd")
def test_the_sum_of_several() -> None:
    magnitudes = [0.1, 3.0, 1e-8, 0.7, 0.0]
    for count in SIZES:
        xs = [torch.randn(count, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
        arrays = [torch.tensor([magnitude]) for magnitude in magnitudes]
        words = [kernels.pack_signs(x, array) for x, array in zip(xs, arrays, strict=True)]
        out = torch.full((count,), 77.0)
        kernels.unpack_signs(words, arrays, out, 0.3)
        wanted = np.zeros(count, np.float32)
        for magnitude, one in zip(magnitudes, words, strict=True):
            wanted = wanted + signed(magnitude, one.numpy(), count)
        assert_same_bits(out, torch.from_numpy(wanted * np.float32(0.3)))


def test_threads_in_place() -> None:
    x = torch.randn(3_000_001)
    words, wanted = words_of(x.numpy()), x - torch.copysign(torch.tensor(0.7), x)
    kernels.set_num_threads(2)
    try:
        found = kernels.pack_signs(x, torch.tensor([0.7]), remainder=x)
        out = torch.empty_like(x)
        kernels.unpack_signs([found], [torch.tensor([2.0])], out)
    finally:
        kernels.set_num_threads(None)
    assert np.array_equal(found.numpy(), words)
    assert torch.equal(x, wanted)
    assert np.array_equal(out.numpy(), signed(2.0, words, len(x)))


def test_bad_arguments() -> None:
    x, one = torch.ones(100), torch.ones(1)
    words = kernels.pack_signs(x, one)
    cases: list[tuple[str, Any]] = [
        ("x has dtype float16, wanted float32", lambda: kernels.pack_signs(x.half(), one)),
        ("magnitude has 2 elements, wanted 1", lambda: kernels.pack_signs(x, x[:2])),
        ("magnitude has dtype float64", lambda: kernels.pack_signs(x, one.double())),
        ("words has 3 elements, wanted 4", lambda: kernels.pack_signs(x, one, words[:3])),
        ("words has dtype int64, wanted int32", lambda: kernels.pack_signs(x, one, words.long())),
        ("remainder has 7 elements, wanted 100", lambda: kernels.pack_signs(x, one, remainder=x[:7])),
        ("words[1] has 3 elements, wanted 4", lambda: kernels.unpack_signs([words, words[:3]], [one, one], x)),
        ("magnitudes has 1 elements, wanted 2: as words", lambda: kernels.unpack_signs([words, words], [one], x)),
        ("magnitudes[0] has 2 elements, wanted 1", lambda: kernels.unpack_signs([words], [x[:2]], x)),
        ("out has dtype float64", lambda: kernels.unpack_signs([words], [one], x.double())),
        ("words is empty", lambda: kernels.unpack_signs([], [], x)),
    ]
    for message, call in cases:
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert message in str(raised.value)


@requires_gpu
@pytest.mark.parametrize("gap", [0, 1])
def test_gpu(gpu: Gpu, gap: int) -> None:
    magnitude = torch.tensor([0.7])
    for count in SIZES:
        x = interesting(count + gap, torch.float32, count)[gap:]
        left = torch.empty(count)
        words = kernels.pack_signs(x, magnitude, remainder=left)
        on_gpu, found = gpu.put(x), gpu.garbage(len(words), torch.int32)
        kernels.pack_signs(on_gpu, gpu.put(magnitude), found)
        assert_same_bits(gpu.get(found), words)
        again = gpu.garbage(len(words), torch.int32)
        kernels.pack_signs(on_gpu, gpu.put(magnitude), again, remainder=on_gpu)
        assert_same_bits(gpu.get(again), words)
        assert_same_bits(gpu.get(on_gpu), left)


@requires_gpu
def test_gpu_the_sum_of_several(gpu: Gpu) -> None:
    scratch = kernels.Scratch()
    scale = torch.tensor(0.3)
    for count, gap, num_parts in ((0, 0, 6), (1, 0, 6), (33, 1, 17), (5003, 3, 6), (2048, 0, 1)):
        magnitudes = [torch.tensor([0.1 * p]) for p in range(num_parts)]
        words = [kernels.pack_signs(torch.randn(count), magnitude) for magnitude in magnitudes]
        wanted = torch.empty(count)
        kernels.unpack_signs(words, magnitudes, wanted, scale.item())
        out = gpu.put(torch.full((count + gap,), 77.0)[gap:])
        kernels.unpack_signs(gpu.puts(words), gpu.puts(magnitudes), out, gpu.put(scale), scratch=scratch)
        assert_same_bits(gpu.get(out), wanted)
