"""pack_chunks and unpack_chunks against the definition in csrc/kernels/chunks.h, written with Python's integers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pycomm import kernels
from pycomm.kernels import Chunks
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits, interesting, misaligned, simd

__all__ = ["gpu", "simd"]

CONFIGS = [
    Chunks(64),
    Chunks(1, 1),
    Chunks(5, 64, 4),
    Chunks(64, 64, 8),
    Chunks(40, 64, 2),
    Chunks(3, 256, 8),
    Chunks(700, 2048, 2),
    Chunks(9, 8192, 4),
    Chunks(200, 65536, 2),
]
SIZES = [0, 1, 2, 63, 64, 65, 300, 4096, 4099, 9000]
MOST_CHUNKS = 3000  # that Python's integers go through in a test


def sizes_of(config: Chunks) -> list[int]:
    return [size for size in SIZES if size < MOST_CHUNKS * config.chunk]


def selected(x: np.ndarray, k: int) -> np.ndarray:
    """The indices of the k largest magnitudes, ascending: ties to the lowest index, every NaN above inf."""
    keys = np.minimum(x.view(np.uint32) & 0x7FFFFFFF, 0x7F800001).astype(np.int64)
    return np.sort(np.argsort(-keys, kind="stable")[:k])


def upper_half(x: float) -> int:
    return int(np.array([x], np.float32).view(np.uint32)[0] >> 16)


def levels_word(values: np.ndarray, bits: int) -> int:
    sizes = np.abs(values)
    top = float(sizes.max())
    if not math.isfinite(top):
        return 0x7FC07FC0
    if top < 2.0**-100:
        return 0
    if bits > 2:
        return upper_half(float(sizes.min())) | upper_half(top) << 16
    unit = 2.0 ** (math.frexp(top)[1] - 24)
    fixed = [int(float(size) / unit) for size in sizes]
    mean = sum(fixed) // len(fixed)
    low, high = ([one for one in fixed if (one > mean) is above] for above in (False, True))
    of_low = sum(low) // len(low)
    of_high = sum(high) // len(high) if high else of_low
    return upper_half(of_low * unit) | upper_half(of_high * unit) << 16


def floats_of(word: int) -> tuple[np.float32, np.float32]:
    low, high = np.array([word << 16 & 0xFFFFFFFF, word & 0xFFFF0000], np.uint32).view(np.float32)
    return low, high


def entries_of(x: np.ndarray, config: Chunks) -> tuple[np.ndarray, np.ndarray, int, list[int]]:
    """Of one chunk: the indices of its entries, what each stands for, its first word, and their codes."""
    indices = selected(x, min(config.k, len(x)))
    values = x[indices]
    word = levels_word(values, config.bits)
    low, high = floats_of(word)
    most = np.float32(2 ** (config.bits - 1) - 1)
    with np.errstate(all="ignore"):
        step = (high - low) / most
        inverse = np.float32(0) if step == 0 else np.float32(1) / step
        level = np.rint((np.abs(values) - low) * inverse)
        level = np.where(level > 0, np.minimum(level, most), np.float32(0)).astype(np.float32)
        sizes = (low + level * step).astype(np.float32)
    signs = np.signbit(values)
    codes = (signs.astype(np.int64) << (config.bits - 1)) + level.astype(np.int64)
    return indices, np.where(signs, -sizes, sizes), word, codes.tolist()


def low_bits(n: int, k: int) -> int:
    low = 0
    while k << (low + 1) <= n:
        low += 1
    return low


def defined(x: np.ndarray, config: Chunks) -> tuple[np.ndarray, np.ndarray]:
    """The words, and what they stand for, for every element."""
    words: list[int] = []
    meant = np.zeros(len(x), np.float32)
    for begin in range(0, len(x), config.chunk):
        chunk = x[begin : begin + config.chunk]
        indices, values, number, codes = entries_of(chunk, config)
        meant[begin + indices] = values
        low, at = low_bits(len(chunk), len(indices)), 32
        for m, index in enumerate(indices.tolist()):
            number |= 1 << (at + (index >> low) + m)
        at += len(indices) + ((len(chunk) - 1) >> low) + 1
        for index, code in zip(indices.tolist(), codes, strict=True):
            number |= (index & ((1 << low) - 1) | code << low) << at
            at += low + config.bits
        words += [number >> shift & 0xFFFFFFFF for shift in range(0, at, 32)]
    return np.array(words, np.uint32).view(np.int32), meant


@cache
def defined_of_some(count: int, seed: int, config: Chunks) -> tuple[np.ndarray, np.ndarray]:
    return defined(some(count, seed).numpy(), config)


def decoded(words: np.ndarray, config: Chunks, count: int) -> np.ndarray | None:
    """What words stand for; ``None`` if pack_chunks makes no such words."""
    out, at = np.zeros(count, np.float32), 0
    for begin in range(0, count, config.chunk):
        n = min(config.chunk, count - begin)
        k, width = min(config.k, n), low_bits(n, min(config.k, n)) + config.bits
        low, num_upper = width - config.bits, k + ((n - 1) >> (width - config.bits)) + 1
        num_words = (32 + num_upper + k * width + 31) // 32
        number = sum((int(word) & 0xFFFFFFFF) << 32 * w for w, word in enumerate(words[at : at + num_words]))
        at += num_words
        places = [bit for bit in range(num_upper) if number >> (32 + bit) & 1]
        fields = [number >> (32 + num_upper + m * width) & ((1 << width) - 1) for m in range(k)]
        found = [
            (place - m) << low | field & ((1 << low) - 1)
            for m, (place, field) in enumerate(zip(places, fields, strict=False))
        ]
        if len(places) != k or found != sorted(set(found)) or found[-1] >= n:
            return None
        smallest, largest = floats_of(number & 0xFFFFFFFF)
        with np.errstate(all="ignore"):
            step = (largest - smallest) / np.float32(2 ** (config.bits - 1) - 1)
            codes = np.array([field >> low for field in fields])
            sizes = smallest + (codes & (2 ** (config.bits - 1) - 1)).astype(np.float32) * step
            out[begin + np.array(found)] = np.where(codes >> (config.bits - 1) == 1, -sizes, sizes)
    return out


def some(count: int, seed: int = 1) -> torch.Tensor:
    """With ties, zeros of both signs, a chunk's worth of tiny ones, and a few that are much larger."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator)
    x[::7] = (x[::7] * 4).round() / 4
    x[count // 3 :: 97] = -0.0
    x[count // 2 :: 131] *= 50
    x[: min(64, count // 4)] *= 2.0**-110
    return x


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_against_the_definition(config: Chunks) -> None:
    for count in sizes_of(config):
        x = misaligned(some(count), 4)
        left, untouched = np.full(count, 77, np.float32), x.copy()
        words = kernels.pack_chunks(x, config, remainder=left, decay=0.75)
        wanted, values = defined_of_some(count, 1, config)
        assert np.array_equal(words, wanted)
        found = decoded(words, config, count)
        assert found is not None
        assert np.array_equal(found, values)
        assert np.array_equal(x, untouched)
        assert_same_bits(torch.from_numpy(left), torch.from_numpy((x - values) * np.float32(0.75)))
        out = np.full(count, 77, np.float32)
        kernels.unpack_chunks([words], config, out)
        assert np.array_equal(out, values)


@pytest.mark.usefixtures("simd")
def test_values_of_every_kind() -> None:
    """Any finite float32, equal ones, and few that are not zero: the choice between equal magnitudes shows."""
    sparse = torch.zeros(500)
    sparse[[3, 77, 400]] = torch.tensor([1.0, -2.0, 2.0])
    wild = interesting(700, torch.float32, 3)
    cases = [wild[wild.isfinite()], torch.full((500,), -2.5), sparse, torch.full((500,), 3.4e38), torch.zeros(500)]
    for x in cases:
        for config in (Chunks(20, 128), Chunks(20, 128, 4), Chunks(20, 128, 8), Chunks(128, 128)):
            assert np.array_equal(kernels.pack_chunks(x, config).numpy(), defined(x.numpy(), config)[0])


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_spoils_its_chunk_alone(bad: float) -> None:
    x = torch.ones(300)
    x[100] = bad
    config = Chunks(5, 64)
    words = kernels.pack_chunks(x, config).view(-1, config.num_words(64))[:, 0].tolist()
    assert [word == 0x7FC07FC0 for word in words] == [False, True, False, False, False]
    out = torch.empty(300)
    kernels.unpack_chunks([kernels.pack_chunks(x, config)], config, out)
    assert out.isnan().nonzero().flatten().tolist() == [64, 65, 66, 67, 100], "selected as topk does, NaN or inf first"


def test_two_levels_are_better_than_one_and_bear_an_outlier() -> None:
    """The mean square error of what is sent, against that of one mean, and of levels at the extremes."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    x[5] = 100.0
    sent = torch.empty_like(x)
    kernels.unpack_chunks([kernels.pack_chunks(x, Chunks(64))], Chunks(64), sent)
    assert sent[5] == 100.0, "of one large element and others"
    entries = x[sent != 0].abs()
    errors = ((sent - x)[sent != 0] ** 2).sum()
    assert entries.numel() == 64
    assert errors < 0.1 * ((entries - entries.mean()) ** 2).sum()
    usual = torch.randn(1 << 16, generator=torch.Generator().manual_seed(3))
    for bits, most in ((2, 0.45), (4, 0.05), (8, 0.003)):
        config = Chunks(64, 4096, bits)
        sent = torch.empty_like(usual)
        kernels.unpack_chunks([kernels.pack_chunks(usual, config)], config, sent)
        chosen = sent.view(16, 4096) != 0
        entries = usual.view(16, 4096)[chosen].view(16, 64).abs()
        spread = ((entries - entries.mean(dim=1, keepdim=True)) ** 2).sum()
        assert ((sent - usual) ** 2)[chosen.flatten()].sum() < most * spread, bits


def test_threads_in_place() -> None:
    x, config = some(3_000_001), Chunks(64, 1024, 4)
    wanted, words = x.clone(), kernels.pack_chunks(x, config)
    kernels.set_num_threads(2)
    try:
        again = kernels.pack_chunks(x, config, remainder=x)
        out = torch.empty_like(x)
        kernels.unpack_chunks([words, words], config, out, 0.5)
    finally:
        kernels.set_num_threads(None)
    assert torch.equal(again, words)
    assert torch.equal(wanted - out, x)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_the_sum_of_several(config: Chunks) -> None:
    for count in sizes_of(config):
        parts = [kernels.pack_chunks(some(count, seed), config) for seed in range(5)]
        out = torch.full((count,), 77.0)
        kernels.unpack_chunks(parts, config, out, 0.3)
        wanted = torch.zeros(count)
        for seed in range(5):
            wanted = wanted + torch.from_numpy(defined_of_some(count, seed, config)[1])
        assert_same_bits(out, wanted * torch.tensor(0.3))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_sizes(bits: int) -> None:
    """At the published settings 8 bits for a position, which takes 12 without a code."""
    config = Chunks(64, 4096, bits)
    assert config.num_words(4096) == (32 + 64 * (8 + bits)) // 32
    assert config.num_words(10 * 4096 + 1) == 10 * config.num_words(4096) + 2
    assert config.num_words(0) == 0
    for n, k in ((4096, 1), (4096, 20), (4096, 1024), (4096, 1025), (4096, 4096), (100, 64), (64, 64), (1, 1)):
        low = low_bits(n, k)
        of_indices = k + ((n - 1) >> low) + 1 + k * low
        assert Chunks(k, 4096, bits).num_words(n) == math.ceil((32 + of_indices + k * bits) / 32)
        assert of_indices <= 12 * k or not 4 <= k <= n / 4


def spoiled(config: Chunks, count: int) -> list[torch.Tensor]:
    """Words that pack_chunks cannot have made: another number of entries, indices that go back, or beyond the end."""
    words = kernels.pack_chunks(some(count), config)
    few, many, beyond, back = (words.clone() for _ in range(4))
    few[1] = 0
    many[1] = -1
    # One entry after the other at the end of the last chunk; the same lowest bits for all of them.
    last, _ = defined(some(count)[: count // config.chunk * config.chunk].numpy(), config)
    beyond[len(last) + 1 :] = -1
    back[2:] = 0
    return [few, many, beyond, back]


def test_words_of_others() -> None:
    config, count = Chunks(20, 256, 2), 600
    good = kernels.pack_chunks(some(count), config)
    for bad in spoiled(config, count):
        out = torch.full((count + 200,), 77.0)
        with pytest.raises(ValueError, match=r"words\[1\] was not made by pack_chunks from 600 elements"):
            kernels.unpack_chunks([good, bad], config, out[100:-100])
        assert (out[:100] == 77).all()
        assert (out[-100:] == 77).all()


def test_bad_arguments() -> None:
    x, config = torch.ones(100), Chunks(5, 64)
    words = kernels.pack_chunks(x, config)
    cases: list[tuple[str, Any]] = [
        ("x has dtype float64, wanted float32", lambda: kernels.pack_chunks(x.double(), config)),
        ("words has 3 elements", lambda: kernels.pack_chunks(x, config, words[:3])),
        ("words has dtype int64, wanted int32", lambda: kernels.pack_chunks(x, config, words.long())),
        ("remainder has 7 elements, wanted 100", lambda: kernels.pack_chunks(x, config, remainder=x[:7])),
        ("decay is 'x'", lambda: kernels.pack_chunks(x, config, decay="x")),  # type: ignore[arg-type]
        ("k is 0, wanted 1 <= k <= 64", lambda: kernels.pack_chunks(x, replace(config, k=0))),
        ("k is 65, wanted 1 <= k <= 64", lambda: kernels.pack_chunks(x, replace(config, k=65))),
        ("chunk is 96, wanted a power of two", lambda: kernels.pack_chunks(x, replace(config, chunk=96))),
        (
            "chunk is 131072, wanted a power of two up to",
            lambda: kernels.pack_chunks(x, replace(config, chunk=1 << 17)),
        ),
        ("chunk is 0, wanted a power of two", lambda: kernels.pack_chunks(x, replace(config, chunk=0))),
        ("bits is 3, wanted 2, 4 or 8", lambda: kernels.pack_chunks(x, replace(config, bits=3))),
        ("config is a int, wanted a Chunks", lambda: kernels.pack_chunks(x, 3)),  # type: ignore[arg-type]
        ("words[1] has 3 elements", lambda: kernels.unpack_chunks([words, words[:3]], config, x)),
        ("out has dtype float64", lambda: kernels.unpack_chunks([words], config, x.double())),
        ("words is empty", lambda: kernels.unpack_chunks([], config, x)),
        ("count is -1", lambda: config.num_words(-1)),
    ]
    for message, call in cases:
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert message in str(raised.value)


@requires_gpu
@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_gpu(gpu: Gpu, config: Chunks) -> None:
    for count, gap in ((0, 0), (1, 0), (67, 1), (300, 0), (4096, 0), (9001, 2)):
        if count > 70 * config.chunk:
            continue
        x = some(count + gap)[gap:]
        left = torch.full((count,), 77.0)
        words = kernels.pack_chunks(x, config, remainder=left, decay=0.75)
        on_gpu, found = gpu.put(x), gpu.garbage(len(words), torch.int32)
        kernels.pack_chunks(on_gpu, config, found)
        assert_same_bits(gpu.get(found), words)
        again = gpu.garbage(len(words), torch.int32)
        kernels.pack_chunks(on_gpu, config, again, remainder=on_gpu, decay=0.75)
        assert_same_bits(gpu.get(again), words)
        assert_same_bits(gpu.get(on_gpu), left)


@requires_gpu
def test_gpu_values_of_every_kind(gpu: Gpu) -> None:
    for x in (interesting(700, torch.float32, 3), torch.full((500,), -2.5), torch.zeros(500)):
        for config in (Chunks(20, 128), Chunks(20, 128, 8)):
            words, found = kernels.pack_chunks(x, config), kernels.pack_chunks(gpu.put(x), config)
            assert_same_bits(gpu.get(found), words)


@requires_gpu
def test_gpu_the_sum_of_several(gpu: Gpu) -> None:
    scratch, scale = kernels.Scratch(), torch.tensor(0.3)
    for count, gap, num_parts in ((0, 0, 6), (1, 0, 6), (67, 1, 40), (1001, 3, 6), (512, 0, 1)):
        for config in (Chunks(64), Chunks(30, 64, 8)):
            parts = [kernels.pack_chunks(some(count, seed), config) for seed in range(num_parts)]
            wanted = torch.empty(count)
            kernels.unpack_chunks(parts, config, wanted, scale.item())
            out = gpu.put(torch.full((count + gap,), 77.0)[gap:])
            kernels.unpack_chunks(gpu.puts(parts), config, out, gpu.put(scale), scratch=scratch)
            assert_same_bits(gpu.get(out), wanted)


@requires_gpu
def test_gpu_words_of_others(gpu: Gpu) -> None:
    config, count = Chunks(20, 256, 2), 600
    good = kernels.pack_chunks(some(count), config)
    for bad in spoiled(config, count):
        out = gpu.put(torch.full((count,), 77.0))
        kernels.unpack_chunks([gpu.put(good), gpu.put(bad)], config, out)
        gpu.get(out)
        with pytest.raises(ValueError, match=r"words\[1\] was not made by pack_chunks from 600 elements"):
            kernels.absmax([gpu.put(torch.ones(1))])
