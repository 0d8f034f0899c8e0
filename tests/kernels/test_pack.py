"""pack and unpack against torch, for all types, sizes, alignments and instruction sets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pycomm._native as _native
from pycomm import kernels
from tests.kernels.reference import FLOATS, assert_same_bits, cast, interesting, misaligned, pairs, simd

__all__ = ["simd"]

SIZES = [0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 1000]


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize(("source", "target"), pairs(FLOATS))
def test_pack_rounds_as_the_contract_says(source: torch.dtype, target: torch.dtype) -> None:
    tensors = [interesting(n, source, seed=n) for n in SIZES]
    out = torch.empty(sum(SIZES), dtype=target)
    finite = kernels.pack(tensors, out, scale=0.75)
    wanted = torch.cat([cast(t, target, 0.75) for t in tensors])
    assert_same_bits(out, wanted)
    assert finite.dtype == torch.bool
    assert finite.shape == ()
    assert bool(finite) == bool(torch.isfinite(wanted).all())


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize(("source", "target"), pairs(FLOATS))
def test_unpack_inverts_pack(source: torch.dtype, target: torch.dtype) -> None:
    flat = interesting(sum(SIZES), source, seed=3)
    outs = [torch.empty(n, dtype=target) for n in SIZES]
    kernels.unpack(flat, outs, scale=3.0)
    assert_same_bits(torch.cat(outs), cast(flat, target, 3.0))


@pytest.mark.usefixtures("simd")
@given(
    counts=st.lists(st.integers(0, 200), min_size=1, max_size=8),
    offsets=st.tuples(st.integers(0, 63), st.integers(0, 63)),
    types=st.tuples(st.sampled_from(["float32", "float16", "float64"]), st.sampled_from(["float32", "float16"])),
    seed=st.integers(0, 1000),
)
def test_any_alignment(counts: list[int], offsets: tuple[int, int], types: tuple[str, str], seed: int) -> None:
    source, target = (getattr(torch, name) for name in types)
    tensors = [interesting(n, source, seed + i) for i, n in enumerate(counts)]
    arrays = [misaligned(t, offsets[0]) for t in tensors]
    out = misaligned(torch.zeros(sum(counts), dtype=target), offsets[1])
    finite = kernels.pack(arrays, out, scale=1.5)
    wanted = torch.cat([cast(t, target, 1.5) for t in tensors])
    assert_same_bits(torch.from_numpy(out.copy()), wanted)
    assert isinstance(finite, np.ndarray)
    assert bool(finite) == bool(torch.isfinite(wanted).all())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("largest", "too_large"), [(7.5, 0), (8.0, 1), (float("nan"), 1)])
def test_flags(dtype: torch.dtype, largest: float, too_large: int) -> None:
    """An empty array has data; what a missing one holds is not read."""
    arrays = [torch.full((3,), 2.0), torch.full((2,), float("nan")), torch.ones(0), torch.tensor([largest, 1.0])]
    out, flags = torch.full((7,), 5.0, dtype=dtype), torch.full((11,), 5.0, dtype=dtype)
    kernels.pack_flagged(arrays, [True, False, True, True], out, flags, torch.tensor([True, False, False]), limit=8.0)
    assert_same_bits(out, torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0, largest, 1.0], dtype=dtype))
    assert flags.tolist() == [1, 0, 1, 1, too_large, 1, 0, 0, 0, 1, 1]
    kernels.pack_flagged(arrays, [True] * 4, out, flags, limit=8.0)
    assert flags.tolist() == [1, 1, 1, 1, 1] + [0] * 6
    kernels.pack_flagged([out[:3], out[3:]], [True, False], out, flags[:3])  # in place
    assert out.tolist() == [2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("largest", [7.5, -8.0, float("nan"), float("-inf")])
def test_what_lies_in_place_is_checked(dtype: torch.dtype, largest: float) -> None:
    out, flags = torch.full((1003,), -2.0, dtype=dtype), torch.empty(3, dtype=dtype)
    for place in (0, 500, 1002):
        values = out.clone()
        values[place] = largest
        before = values.clone()
        kernels.pack_flagged([values[:501], values[501:]], [True, True], values, flags, limit=8.0)
        assert_same_bits(values, before)
        assert flags.tolist() == [1, 1, float(largest != 7.5)]
        assert bool(kernels.pack([values[:501], values[501:]], values)) == math.isfinite(largest)


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("skip", [(0, 0), (0, 1000), (0, 3), (2, 5), (3, 700), (900, 1000), (1000, 1000)])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_skipped_is_neither_read_nor_written(skip: tuple[int, int], threads: int) -> None:
    arrays = [torch.ones(3), torch.full((2,), 9.0), torch.ones(0), torch.randn(994), torch.randn(1)]
    wanted = torch.cat([arrays[0], torch.zeros(2), *arrays[2:]])
    flat = torch.cat(arrays)
    flat[slice(*skip)] = float("nan")
    wanted[slice(*skip)] = 7.0
    out, flags = torch.full((1000,), 7.0), torch.empty(6)
    kernels.set_num_threads(threads)
    try:
        tensors = list(torch.split(flat, [len(array) for array in arrays]))
        kernels.pack_flagged(tensors, [True, False, True, True, True], out, flags, skip=skip)
    finally:
        kernels.set_num_threads(None)
    assert_same_bits(out, wanted)
    assert flags.tolist() == [1, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("skip", [(-1, 2), (2, 1), (0, 4), (4, 4)])
def test_what_cannot_be_skipped(skip: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"skip is \(.*\), wanted a range of out's 3 elements"):
        kernels.pack_flagged([torch.ones(3)], [True], torch.zeros(3), torch.zeros(2), skip=skip)


def test_flags_that_do_not_fit() -> None:
    out, flags = torch.zeros(3), torch.zeros(8)
    for has_data, places, bits, says in [
        ([True], flags, None, "has_data"),
        ([True, True], flags, None, "flags has 8 elements, wanted 7"),
        ([True, True], flags[:2], None, "flags has 2 elements, wanted"),
        ([True, True], flags[:7], torch.ones(3, dtype=torch.bool), "bits has 3 elements, wanted 2"),
        ([True, True], flags[:7].double(), None, "flags"),
    ]:
        with pytest.raises((TypeError, ValueError), match=says):
            kernels.pack_flagged([torch.ones(1), torch.ones(2)], has_data, out, places, bits)


@pytest.mark.pairwise
@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_outputs_are_streamed_and_still_right(target: torch.dtype, threads: int) -> None:
    counts = [1_500_001, 3, 2_999_999, 1_000_000]
    tensors = [torch.randn(n) for n in counts]
    out = torch.empty(sum(counts) + 1, dtype=target)[1:]  # not on a cache line
    kernels.set_num_threads(threads)
    try:
        assert kernels.pack(tensors, out)
        tensors[2][-1] = float("inf")
        assert not kernels.pack(tensors, out)
    finally:
        kernels.set_num_threads(None)
    assert_same_bits(out, torch.cat(tensors).to(target))


@pytest.mark.parametrize(
    ("value", "target", "finite"),
    [
        (65519.0, torch.float16, True),
        (65520.0, torch.float16, False),
        (3.3895e38, torch.bfloat16, True),
        (3.4e38, torch.bfloat16, False),
        (3.4e38, torch.float32, True),
        (float("nan"), torch.float32, False),
        (-float("inf"), torch.float64, False),
    ],
)
def test_an_overflow_in_the_cast_is_not_finite(value: float, target: torch.dtype, finite: bool) -> None:
    for position in (0, 40, 99):
        x = torch.ones(100)
        x[position] = value
        assert bool(kernels.pack([x], torch.empty(100, dtype=target))) is finite


@pytest.mark.usefixtures("simd")
@pytest.mark.parametrize(("source", "target"), pairs(FLOATS))
@pytest.mark.parametrize("place", [0, 63, 64, 200])
def test_what_reaches_the_limit_is_not_finite(source: torch.dtype, target: torch.dtype, place: int) -> None:
    for value, fits in ((3.5, True), (4.0, False), (-4.0, False), (-3.5, True), (torch.nan, False)):
        x = torch.ones(201, dtype=source)
        x[place] = value
        out = torch.empty(201, dtype=target)
        assert bool(kernels.pack([x], out, 2.0, limit=8.0)) == fits
        assert_same_bits(out, cast(x, target, 2.0))


def test_non_contiguous_inputs_are_read_in_logical_order() -> None:
    x = torch.arange(12.0).view(3, 4)
    out = torch.empty(12)
    kernels.pack([x.t()], out)
    assert torch.equal(out.view(4, 3), x.t())


def test_hundreds_of_tensors_and_mixed_types() -> None:
    tensors = [torch.randn(i % 37, dtype=FLOATS[i % 4]) for i in range(400)]
    out = torch.empty(sum(t.numel() for t in tensors))
    kernels.pack(tensors, out)
    assert_same_bits(out, torch.cat([cast(t, torch.float32) for t in tensors]))


class TestBadInput:
    def test_no_tensors(self) -> None:
        with pytest.raises(ValueError, match="tensors is empty"):
            kernels.pack([], torch.empty(0))

    def test_integer_tensor(self) -> None:
        with pytest.raises(TypeError, match=r"tensors\[1\] has dtype int32, wanted float32"):
            kernels.pack([torch.ones(1), torch.ones(1, dtype=torch.int32)], torch.empty(2))

    def test_unknown_dtype(self) -> None:
        with pytest.raises(TypeError, match=r"tensors\[0\] has dtype torch.complex64"):
            kernels.pack([torch.ones(1, dtype=torch.complex64)], torch.empty(2))

    def test_no_array(self) -> None:
        with pytest.raises(TypeError, match=r"tensors\[0\] is a str, wanted"):
            kernels.pack(["x"], torch.empty(2))
        with pytest.raises(TypeError, match="tensors is a int, wanted a sequence"):
            kernels.pack(3, torch.empty(2))  # type: ignore[arg-type]

    def test_size(self) -> None:
        with pytest.raises(ValueError, match="out has 3 elements, wanted 4: the sum over tensors"):
            kernels.pack([torch.ones(4)], torch.empty(3))

    def test_output_not_contiguous(self) -> None:
        with pytest.raises(ValueError, match="out is not contiguous"):
            kernels.pack([torch.ones(4)], torch.empty(4, 2)[:, 0])

    def test_output_read_only(self) -> None:
        out = np.empty(4, np.float32)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out is read-only"):
            kernels.pack([torch.ones(4)], out)

    def test_sparse(self) -> None:
        with pytest.raises(ValueError, match="layout torch.sparse_coo"):
            kernels.pack([torch.ones(4).to_sparse()], torch.empty(4))

    def test_other_device(self) -> None:
        with pytest.raises(ValueError, match="out is on device meta"):
            kernels.pack([torch.ones(4)], torch.empty(4, device="meta"))

    def test_unknown_instruction_set(self) -> None:
        with pytest.raises(ValueError, match="mmx"):
            _native.select_simd("mmx")
