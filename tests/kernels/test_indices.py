"""pack_indices and unpack_indices: the words are those that the definition in csrc/kernels/indices.h gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pycomm import kernels
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits, simd

__all__ = ["gpu", "simd"]

LARGEST = 2**31 - 1


def words_of(indices: list[int], limit: int) -> list[int]:
    """The definition, in integers of any length."""
    count = len(indices)
    low = 0
    while limit >= count << (low + 1):
        low += 1
    lower = sum((index & ((1 << low) - 1)) << (m * low) for m, index in enumerate(indices))
    upper = sum(1 << ((index >> low) + m) for m, index in enumerate(indices))
    sizes = -(-count * low // 32), -(-(count + ((limit - 1) >> low) + 1) // 32)
    assert upper < 1 << 32 * sizes[1]
    return [
        part >> (32 * w) & 0xFFFFFFFF for part, size in zip((lower, upper), sizes, strict=True) for w in range(size)
    ]


def some_indices(limit: int, count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, limit, (count,), generator=generator).sort().values.int()


def check(indices: torch.Tensor, limit: int) -> None:
    count = len(indices)
    words = kernels.pack_indices(indices, limit)
    assert len(words) == kernels.packed_words(limit, count)
    assert [word & 0xFFFFFFFF for word in words.tolist()] == words_of(indices.tolist(), limit)
    assert torch.equal(kernels.unpack_indices(words, limit, count), indices)


EXTREMES = {
    "the only one": ([0], 1),
    "the first": ([0], LARGEST),
    "the last": ([LARGEST - 1], LARGEST),
    "first and last": ([0, LARGEST - 1], LARGEST),
    "all": (list(range(1000)), 1000),
    "all the same": ([77] * 500, 100),
    "more than there are places": (sorted([*range(70)] * 3), 70),
    "all at the end": (list(range(99_000, 99_100)), 99_100),
    "all at the beginning": (list(range(100)), 99_100),
    "twice the range is a count": (list(range(0, 64, 2)), 64),
    "just below that": (list(range(0, 63, 2)), 63),
    "a gap between dense ones": ([*range(600), *range(900_000, 900_600)], LARGEST),
    "bits of one word each": (list(range(0, 1200 * 1000, 1000)), 1200 * 1000),
    "none, for many words": ([0] * 3 + [LARGEST - 1] * 2000, LARGEST),
}


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str) -> None:
    indices, limit = EXTREMES[name]
    check(torch.tensor(indices, dtype=torch.int32), limit)


@pytest.mark.usefixtures("simd")
@given(limit=st.integers(1, LARGEST) | st.integers(1, 9999), count=st.integers(1, 1500), seed=st.integers(0, 99))
def test_any(limit: int, count: int, seed: int) -> None:
    check(some_indices(limit, count, seed), limit)


@pytest.mark.parametrize("ratio", [0.5, 0.1, 0.01, 0.001])
def test_size(ratio: float) -> None:
    limit = 10_000_000
    count = int(ratio * limit)
    bits = kernels.packed_words(limit, count) * 32 / count
    assert bits < 3 + np.log2(1 / ratio) + 0.1
    indices = some_indices(limit, count)
    assert torch.equal(kernels.unpack_indices(kernels.pack_indices(indices, limit), limit, count), indices)


def test_numpy_and_given_outputs() -> None:
    indices = np.array([3, 9, 9, 40], np.int32)
    out = np.full(kernels.packed_words(50, 4), -1, np.int32)
    words = kernels.pack_indices(indices, 50, out)
    assert words is out
    back = np.full(4, -1, np.int32)
    kernels.unpack_indices(words, 50, 4, back)
    assert back.tolist() == indices.tolist()


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([3, 2], r"indices\[1\] is 2, wanted 3 <= index < 10, ascending"),
        ([-1, 2], r"indices\[0\] is -1, wanted 0 <= index < 10"),
        ([1, 10], r"indices\[1\] is 10, wanted 1 <= index < 10"),
        ([], "there are 0 indices, wanted at least one"),
    ],
)
def test_bad_indices(indices: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.pack_indices(torch.tensor(indices, dtype=torch.int32), 10)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("place", [0, 7, 8, 263, 264, 511, 700, 999])
@pytest.mark.parametrize("bad", [-1, 10**6, LARGEST, -LARGEST - 1])
def test_one_bad_index_among_many(place: int, bad: int) -> None:
    indices = some_indices(10**6, 1000)
    before = indices[place - 1].item() if place > 0 else 0
    indices[place] = bad
    message = rf"indices\[{place}\] is {bad}, wanted {before} <= index < 1000000, ascending"
    with pytest.raises(ValueError, match=message):
        kernels.pack_indices(indices, 10**6)


@pytest.mark.usefixtures("simd")
@given(limit=st.integers(3000, 10**6), word=st.integers(0, 2**20), bit=st.integers(0, 31))
def test_a_changed_bit_is_refused_or_gives_ascending_indices(limit: int, word: int, bit: int) -> None:
    indices = some_indices(limit, 1000)
    words = kernels.pack_indices(indices, limit)
    words[word % len(words)] ^= 1 << bit if bit < 31 else -(2**31)
    out = torch.full((1000 + 8,), -7, dtype=torch.int32)
    try:
        kernels.unpack_indices(words, limit, 1000, out[:1000])
    except ValueError:
        pass
    else:
        assert bool((out[:999] <= out[1:1000]).all())
        assert 0 <= out[0] <= out[999] < limit
    assert out[1000:].tolist() == [-7] * 8


def test_bad_arguments() -> None:
    indices = torch.zeros(4, dtype=torch.int32)
    for limit in (0, -1, 2**31):
        with pytest.raises(ValueError, match=f"limit is {limit}, wanted 1 <= limit <= 2147483647"):
            kernels.pack_indices(indices, limit)
        with pytest.raises(ValueError, match=f"limit is {limit}"):
            kernels.packed_words(limit, 3)
    with pytest.raises(TypeError, match="indices has dtype int64, wanted int32"):
        kernels.pack_indices(indices.long(), 10)
    with pytest.raises(ValueError, match="words has 3 elements, wanted 2"):
        kernels.pack_indices(indices, 10, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="words has 3 elements, wanted 2"):
        kernels.unpack_indices(torch.zeros(3, dtype=torch.int32), 10, 4)
    with pytest.raises(TypeError, match="words has dtype float32"):
        kernels.unpack_indices(torch.zeros(1), 10, 4)


def spoilt_words(change: str) -> torch.Tensor:
    """Of ten indices below 1,000; the lower bits fill two words."""
    words: torch.Tensor = kernels.pack_indices(torch.arange(0, 1000, 100, dtype=torch.int32), 1000)
    if change == "fewer":
        words[2] &= words[2] - 1
    elif change == "more":
        words[2] |= ~words[2] & -~words[2]
    else:
        words[0], words[1], words[2] = -1, -1, 0x3FF << 16
    return words


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fewer", "words hold fewer indices than count says"),
        ("more", "words hold more indices than count says|not hold ascending indices"),
        ("too large", "words do not hold ascending indices below range"),
    ],
)
def test_bad_words(change: str, message: str) -> None:
    words = spoilt_words(change)
    with pytest.raises(ValueError, match=message):
        kernels.unpack_indices(words, 1000, 10)


@requires_gpu
def test_gpu(gpu: Gpu) -> None:
    scratch = kernels.Scratch()
    cases = [(torch.tensor(indices, dtype=torch.int32), limit) for indices, limit in EXTREMES.values()]
    sizes = ((10**6, 1000), (LARGEST, 3000), (12_345, 5000), (40_000, 9000), (10**6, 63))
    cases += [(some_indices(limit, count), limit) for limit, count in sizes]
    for indices, limit in cases:
        words = kernels.pack_indices(indices, limit)
        packed = kernels.pack_indices(gpu.put(indices), limit, gpu.garbage(len(words), torch.int32))
        assert_same_bits(gpu.get(packed), words)
        out = gpu.garbage(len(indices), torch.int32)
        kernels.unpack_indices(gpu.put(words), limit, len(indices), out, scratch=scratch)
        assert_same_bits(gpu.get(out), indices)
        # Another kernel's table in the same memory must not be taken for one that is still there.
        ones = gpu.garbage(3, torch.float32)
        kernels.pack([gpu.put(torch.ones(3))], ones, scratch=scratch)
        assert gpu.get(ones).tolist() == [1.0, 1.0, 1.0]


@requires_gpu
@pytest.mark.parametrize("bad", [[3, 2, 5], [-1, 2, 3], [1, 2, 10], [1, 2, LARGEST], [1, 2, -LARGEST - 1]])
def test_gpu_bad_indices(gpu: Gpu, bad: list[int]) -> None:
    index = next(m for m, index in enumerate(bad) if not (0 <= index < 10 and index >= max(bad[:m], default=0)))
    words = gpu.garbage(kernels.packed_words(10, 3), torch.int32)
    kernels.pack_indices(gpu.put(torch.tensor(bad, dtype=torch.int32)), 10, words)
    gpu.get(words)  # waits
    message = rf"pack_indices: indices\[{index}\] is {bad[index]}, wanted 0 <= index < 10, ascending"
    with pytest.raises(ValueError, match=message):
        kernels.absmax([gpu.put(torch.ones(1))])
    kernels.absmax([gpu.put(torch.ones(1))])  # raised once


@requires_gpu
@pytest.mark.parametrize("change", ["fewer", "more", "too large"])
def test_gpu_bad_words(gpu: Gpu, change: str) -> None:
    memory = gpu.put(torch.full((12,), 55, dtype=torch.int32))
    kernels.unpack_indices(gpu.put(spoilt_words(change)), 1000, 10, memory[1:11])
    before, *_, behind = gpu.get(memory).tolist()
    assert (before, behind) == (55, 55)
    with pytest.raises(ValueError, match="unpack_indices: words were not made by pack_indices from 10 indices below"):
        kernels.absmax([gpu.put(torch.ones(1))])
