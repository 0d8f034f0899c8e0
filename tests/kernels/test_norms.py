"""squared_norms: the CPU's against torch in float64; a GPU's against the CPU's, in another order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pycomm._native as _native
from pycomm import kernels
from tests.kernels.gpus import EMULATED, Gpu, gpu, requires_gpu
from tests.kernels.reference import (
    ALL_DTYPES,
    FLOATS,
    assert_refused,
    assert_same_bits,
    instruction_sets,
    misaligned,
    simd,
)

__all__ = ["gpu", "simd"]

CLOSE = 1e-12
SIZES = [0, 1, 3, 15, 16, 17, 31, 32, 33, 700, 0, 4095, 4096, 4097, 511, 2]
BIG = [16_383, 16_384, 16_385, 5, 50_001]
"""Around the blocks that the CPU's sums are made of."""


def arrays(sizes: list[int], gap: int = 0, dtypes: tuple[torch.dtype, ...] = FLOATS) -> list[torch.Tensor]:
    """The types take turns; all begin ``gap`` elements into their memory."""
    generator = torch.Generator().manual_seed(7)
    some = (torch.randn(size + gap, generator=generator, dtype=torch.float64) for size in sizes)
    return [values.to(dtypes[j % len(dtypes)])[gap:] for j, values in enumerate(some)]


def wanted(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.double().square().sum() for tensor in tensors])


def assert_close(squares: Any, tensors: list[torch.Tensor]) -> None:
    torch.testing.assert_close(squares, wanted(tensors), rtol=CLOSE, atol=0.0)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_against_torch(gap: int) -> None:
    for dtype in FLOATS:
        tensors = arrays(SIZES + BIG, gap, (dtype,))
        assert_close(kernels.squared_norms(tensors), tensors)
    tensors = arrays(SIZES + BIG, gap)
    assert_close(kernels.squared_norms(tensors), tensors)


@given(sizes=st.lists(st.integers(0, 200), min_size=1, max_size=9), gap=st.integers(0, 3))
def test_any_sizes(sizes: list[int], gap: int) -> None:
    tensors = arrays(sizes, gap)
    assert_close(kernels.squared_norms(tensors), tensors)


def test_neither_threads_nor_instructions_nor_neighbors_nor_addresses_change_the_bits() -> None:
    tensors = arrays([*BIG, 700_001, 3])
    first = kernels.squared_norms(tensors)
    widest = _native.simd()
    try:
        for name in instruction_sets():
            _native.select_simd(name)
            for threads in (1, 2, 3):
                kernels.set_num_threads(threads)
                assert_same_bits(kernels.squared_norms(tensors), first)
    finally:
        _native.select_simd(widest)
        kernels.set_num_threads(None)
    assert_same_bits(kernels.squared_norms(tensors[::-1]).flip(0), first)
    moved = torch.cat([tensors[0].new_zeros(1), tensors[0]])[1:]
    assert_same_bits(kernels.squared_norms([moved]), first[:1])


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_marks_its_array_alone(bad: float) -> None:
    for place in (0, 31, 32, 16_384, 16_389):
        for j in range(4):
            tensors = arrays([16_390] * 4)
            tensors[j][place] = bad
            assert kernels.squared_norms(tensors).isfinite().tolist() == [k != j for k in range(4)]


def test_extremes() -> None:
    largest = [torch.finfo(dtype).max for dtype in FLOATS[:3]]
    tensors = [torch.full((50,), value, dtype=dtype) for value, dtype in zip(largest, FLOATS[:3], strict=True)]
    assert_close(kernels.squared_norms(tensors), tensors)
    assert kernels.squared_norms([torch.tensor([1e-45]), torch.tensor([-0.0])]).tolist() == [
        1.401298464324817e-45**2,
        0,
    ]
    assert kernels.squared_norms([torch.tensor([1e155]).double()]).tolist() == [math.inf]


def test_out() -> None:
    out = torch.full((2,), 77.0).double()
    assert kernels.squared_norms([torch.ones(3), torch.ones(0)], out=out) is out
    assert out.tolist() == [3.0, 0.0]
    assert kernels.squared_norms([torch.ones(4).numpy()]).tolist() == [4.0]


BAD: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensors is empty": ([], {}),
    "tensors is a int": (3, {"out": torch.zeros(1).double()}),
    "tensors[1] is a str": ([torch.ones(1), "x"], {}),
    "tensors[0] is not aligned": ([misaligned(torch.ones(5), 2)], {}),
    "squares has dtype float32, wanted float64 as one float64 for each": ([torch.ones(1)], {"out": torch.zeros(1)}),
    "squares has 2 elements, wanted 1": ([torch.ones(1)], {"out": torch.zeros(2).double()}),
    "squares is not contiguous": ([torch.ones(1)] * 2, {"out": torch.zeros(4).double()[::2]}),
    **{
        f"tensors[1] has dtype {str(dtype).removeprefix('torch.')}": ([torch.ones(1), torch.ones(2, dtype=dtype)], {})
        for dtype in ALL_DTYPES
        if dtype not in FLOATS
    },
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message: str) -> None:
    tensors, options = BAD[message]
    assert_refused(message, lambda: kernels.squared_norms(tensors, **options))


@requires_gpu
@pytest.mark.parametrize("gap", [0, 1, 3])
def test_gpu(gpu: Gpu, gap: int) -> None:
    for dtypes in (FLOATS[:1], FLOATS[1:2], FLOATS):
        tensors = arrays(SIZES, gap, dtypes)
        assert_close(gpu.get(kernels.squared_norms(gpu.puts(tensors))), tensors)
    assert gpu.get(kernels.squared_norms(gpu.puts(arrays([0, 0])))).tolist() == [0.0, 0.0]
    assert gpu.get(kernels.squared_norms(gpu.puts(arrays([4096, 0])))).tolist()[1] == 0.0


@requires_gpu
def test_gpu_of_more_tiles_than_a_block_has_threads(gpu: Gpu) -> None:
    tensors = arrays([30, 140_001, 5] if EMULATED else [30, 5_000_001, 5], dtypes=FLOATS[1:3])
    assert_close(gpu.get(kernels.squared_norms(gpu.puts(tensors))), tensors)


@requires_gpu
def test_gpu_addresses_do_not_change_the_bits(gpu: Gpu) -> None:
    """Or ranks would not agree on a norm that they all compute."""
    for dtype in FLOATS:
        tensors = arrays([4097, 3, 700, 9000], dtypes=(dtype,))
        first = gpu.get(kernels.squared_norms(gpu.puts(tensors)))
        for gap in (1, 5):
            moved = [torch.cat([tensor.new_zeros(gap), tensor])[gap:] for tensor in tensors]
            assert_same_bits(gpu.get(kernels.squared_norms(gpu.puts(moved))), first)


@requires_gpu
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_gpu_what_is_not_finite_marks_its_array_alone(gpu: Gpu, bad: float) -> None:
    for j, place in ((0, 0), (1, 2), (2, 4800), (3, 699)):
        tensors = arrays([300, 3, 5000, 700])
        tensors[j][place] = bad
        squares = gpu.get(kernels.squared_norms(gpu.puts(tensors)))
        assert squares.isfinite().tolist() == [k != j for k in range(4)]


@requires_gpu
def test_gpu_scratch_is_reused(gpu: Gpu) -> None:
    scratch = kernels.Scratch()
    sizes = torch.randint(0, 60, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    tensors = arrays(sizes)
    moved = gpu.puts(tensors)
    for some in (slice(None), slice(None), slice(1, None), slice(20), slice(None)):  # the table changes, or does not
        assert_close(gpu.get(kernels.squared_norms(moved[some], scratch=scratch)), tensors[some])


@requires_gpu
@pytest.mark.skipif(not EMULATED, reason="counts the emulator's launches")
def test_gpu_launches(gpu: Gpu) -> None:
    """ResNet-50's number of arrays: two kernels, and before them two that bring the addresses, when they are new."""
    from tests.emulator.arrays import library

    moved, scratch = gpu.puts(arrays([5] * 161)), kernels.Scratch()

    def launches() -> int:
        before = library().emulator_num_launches()
        kernels.squared_norms(moved, scratch=scratch)
        return library().emulator_num_launches() - before

    assert [launches(), launches(), launches()] == [4, 2, 2]


@requires_gpu
def test_gpu_mixed_devices(gpu: Gpu) -> None:
    with pytest.raises(ValueError, match=r"tensors\[1\] is on cpu, squares on cuda:0; wanted all arrays on one device"):
        kernels.squared_norms([gpu.put(torch.ones(2)), torch.ones(2)])
