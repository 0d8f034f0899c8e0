"""hashes: the CPU's against plain Python, a GPU's against the CPU's: sums of whole numbers, so equal to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pycomm._native as _native
from pycomm import kernels
from tests.kernels.gpus import EMULATED, Gpu, gpu, requires_gpu
from tests.kernels.reference import ALL_DTYPES, assert_refused, instruction_sets, simd

__all__ = ["gpu", "simd"]

SIZES = [0, 1, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 700, 0, 4095, 4096, 4097, 2]


def arrays(sizes: list[int], gap: int = 0, dtypes: tuple[torch.dtype, ...] = ALL_DTYPES) -> list[torch.Tensor]:
    """Any bits, the types taking turns; all begin ``gap`` elements into their memory."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for j, size in enumerate(sizes):
        dtype = dtypes[j % len(dtypes)]
        raw = torch.randint(0, 256, ((size + gap) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        made.append(raw.view(dtype)[gap:] if len(raw) else torch.empty(0, dtype=dtype))
    return made


def scrambled(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def keys(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a = scrambled(x)
    return a, a * np.uint32(0x9E3779B1) + np.uint32(0x85EBCA6B)


def wanted(tensor: torch.Tensor) -> int:
    """The contract's formula, as a signed number."""
    raw = tensor.contiguous().view(-1)
    if raw.numel() == 0:
        return 0
    unsigned = np.dtype(f"u{tensor.element_size()}")
    bits = raw.view(torch.uint8).numpy().view(unsigned).astype(np.uint64)
    numbers = np.arange(len(bits), dtype=np.uint32)
    (a, b), (block_a, block_b) = keys(numbers % np.uint32(1024)), keys(~(numbers // np.uint32(1024)))
    a, b = a + block_a, b + block_b
    low = ((bits & np.uint64(0xFFFFFFFF)).astype(np.uint32) + a).astype(np.uint64)
    high = ((bits >> np.uint64(32)).astype(np.uint32) + b).astype(np.uint64)
    return int((low * high).sum(dtype=np.uint64).view(np.int64))


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_against_the_formula(gap: int) -> None:
    tensors = arrays(SIZES * 2, gap)
    assert kernels.hashes(tensors).tolist() == [wanted(t) for t in tensors]


@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=9), gap=st.integers(0, 3))
def test_any_sizes(sizes: list[int], gap: int) -> None:
    tensors = arrays(sizes, gap)
    assert kernels.hashes(tensors).tolist() == [wanted(t) for t in tensors]


def test_neither_threads_nor_instructions_nor_addresses_change_it() -> None:
    tensors = arrays([700_001, 300_000, 3], dtypes=(torch.float32, torch.bfloat16, torch.float64))
    first = [wanted(t) for t in tensors]
    widest = _native.simd()
    try:
        for name in instruction_sets():
            _native.select_simd(name)
            for threads in (1, 2, 3):
                kernels.set_num_threads(threads)
                assert kernels.hashes(tensors).tolist() == first
    finally:
        _native.select_simd(widest)
        kernels.set_num_threads(None)


def test_memory_order_does_not_count() -> None:
    image = torch.randn(2, 3, 4, 5)
    last = image.contiguous(memory_format=torch.channels_last)
    assert kernels.hashes([image]).tolist() == kernels.hashes([last]).tolist() == [wanted(image)]


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_one_bit_one_swap_and_two_signs_change_it(dtype: torch.dtype) -> None:
    (x,) = arrays([257], dtypes=(dtype,))
    before = kernels.hashes([x]).item()
    raw = x.view(torch.uint8)
    for byte in range(0, len(raw), max(1, len(raw) // 97)):
        for bit in (0, 7):
            raw[byte] ^= 1 << bit
            assert kernels.hashes([x]).item() != before
            raw[byte] ^= 1 << bit
    assert kernels.hashes([x]).item() == before
    item = x.element_size()
    for i, j in ((0, 1), (3, 200), (255, 256)):  # the top bits of two elements
        for element in (i, j):
            raw[element * item + item - 1] ^= 0x80
        assert kernels.hashes([x]).item() != before
        for element in (i, j):
            raw[element * item + item - 1] ^= 0x80
    for i in range(256):
        swapped = x.clone()
        swapped[i], swapped[i + 1] = x[i + 1], x[i]
        same = torch.equal(swapped.view(torch.uint8), x.view(torch.uint8))
        assert same == (kernels.hashes([swapped]).item() == before)


def test_many_small_changes_all_show() -> None:
    """Noise in the last bits, as replicas drift apart: none of 2,000 goes unseen."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    seen = {kernels.hashes([x]).item()}
    generator = torch.Generator().manual_seed(2)
    for _ in range(2000):
        drift = torch.randint(-1, 2, x.shape, generator=generator, dtype=torch.int32)
        seen.add(kernels.hashes([(x.view(torch.int32) + drift).view(torch.float32)]).item())
    assert len(seen) == 2001


def test_out() -> None:
    out = torch.full((2,), 77)
    assert kernels.hashes([torch.ones(3), torch.ones(0)], out=out) is out
    assert out.tolist() == [wanted(torch.ones(3)), 0]
    assert kernels.hashes([np.ones(4, np.int8)]).tolist() == [wanted(torch.ones(4, dtype=torch.int8))]


BAD: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensors is empty": ([], {}),
    "tensors[1] is a str": ([torch.ones(1), "x"], {}),
    "out has dtype float32, wanted int64 as one int64 for each": ([torch.ones(1)], {"out": torch.zeros(1)}),
    "out has 2 elements, wanted 1": ([torch.ones(1)], {"out": torch.zeros(2).long()}),
    "tensors[1] has dtype": ([torch.ones(1), torch.ones(2, dtype=torch.complex64)], {}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message: str) -> None:
    tensors, options = BAD[message]
    assert_refused(message, lambda: kernels.hashes(tensors, **options))


@requires_gpu
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_gpu(gpu: Gpu, gap: int) -> None:
    for dtypes in (ALL_DTYPES[:1], ALL_DTYPES):
        tensors = arrays(SIZES, gap, dtypes)
        assert gpu.get(kernels.hashes(gpu.puts(tensors))).tolist() == kernels.hashes(tensors).tolist()
    assert gpu.get(kernels.hashes(gpu.puts(arrays([0, 0])))).tolist() == [0, 0]


@requires_gpu
def test_gpu_of_more_tiles_than_a_block_has_threads(gpu: Gpu) -> None:
    tensors = arrays([30, 140_001, 5] if EMULATED else [30, 5_000_001, 5], dtypes=(torch.float16, torch.float64))
    assert gpu.get(kernels.hashes(gpu.puts(tensors))).tolist() == kernels.hashes(tensors).tolist()


@requires_gpu
def test_gpu_scratch_is_reused(gpu: Gpu) -> None:
    scratch = kernels.Scratch()
    sizes = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    tensors = arrays(sizes)
    moved = gpu.puts(tensors)
    for some in (slice(None), slice(None), slice(1, None), slice(20), slice(None)):
        assert gpu.get(kernels.hashes(moved[some], scratch=scratch)).tolist() == kernels.hashes(tensors[some]).tolist()
