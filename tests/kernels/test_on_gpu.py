"""The kernels on a GPU against the same kernels on the CPU, which are the specification."""

from __future__ import annotations

import pytest
import torch

from pycomm import kernels
from tests.kernels.gpus import EMULATED, Gpu, gpu, requires_gpu
from tests.kernels.reference import ALL_DTYPES, FLOATS, assert_same_bits, interesting, pairs

__all__ = ["gpu"]
pytestmark = requires_gpu

SIZES = [0, 1, 3, 17, 511, 512, 513, 4095, 4096, 4097, 0, 33]
"""Around a vector, a warp's share and a block's tile."""


def pieces_of(flat: torch.Tensor, sizes: list[int], gap: int) -> list[torch.Tensor]:
    """Views of ``flat`` with ``gap`` elements before each: any alignment that an element can have."""
    pieces, at = [], 0
    for size in sizes:
        at += gap
        pieces.append(flat[at : at + size])
        at += size
    return pieces


@pytest.mark.pairwise
@pytest.mark.parametrize(("source", "target"), pairs(FLOATS))
def test_pack_and_unpack(gpu: Gpu, source: torch.dtype, target: torch.dtype) -> None:
    for gap in (0, 1):
        memory = interesting(sum(SIZES) + len(SIZES), source, 5)
        arrays = pieces_of(memory, SIZES, gap)
        total = sum(SIZES)
        wanted = torch.empty(total, dtype=target)
        kernels.pack(arrays, wanted, 0.3)
        out = gpu.garbage(total + gap, target)
        whole = gpu.get(out)
        target_array = gpu.put(whole[gap:])
        finite = kernels.pack(gpu.puts(arrays), target_array, 0.3)
        assert_same_bits(gpu.get(target_array), wanted)
        assert not gpu.get(finite).item()
        backs = gpu.puts([torch.empty_like(a) for a in arrays])
        kernels.unpack(gpu.put(wanted), backs, 1.7)
        outs = [torch.empty_like(a) for a in arrays]
        kernels.unpack(wanted, outs, 1.7)
        for back, one in zip(backs, outs, strict=True):
            assert_same_bits(gpu.get(back), one)


@pytest.mark.parametrize("largest", [0.0, 1e-42, 1e-38, 0.3, 1.0, 40.0, 3e38, torch.inf, torch.nan])
@pytest.mark.parametrize("inverse", [False, True])
def test_a_scale_that_fits_a_magnitude(gpu: Gpu, largest: float, inverse: bool) -> None:
    values, magnitude = interesting(900, torch.float32, 3), torch.tensor(largest)
    for room in (3, 14):
        wanted = torch.empty(900)
        kernels.pack([values], wanted, kernels.FittingScale(0.3, magnitude, room, inverse))
        for times in (0.3, gpu.put(torch.tensor(0.3))):
            out = gpu.garbage(900, torch.float32)
            kernels.pack([gpu.put(values)], out, kernels.FittingScale(times, gpu.put(magnitude), room, inverse))
            if times == 0.3:
                assert_same_bits(gpu.get(out), wanted)
            else:
                torch.testing.assert_close(gpu.get(out), wanted, rtol=1e-6, atol=0, equal_nan=True)


def test_pack_says_whether_all_is_finite(gpu: Gpu) -> None:
    values = torch.rand(9000)
    out = gpu.garbage(9000, torch.float16)
    scratch = kernels.Scratch()
    assert gpu.get(kernels.pack([gpu.put(values)], out, scratch=scratch)).item()
    assert not gpu.get(kernels.pack([gpu.put(values)], out, 1e6, scratch=scratch)).item()  # overflows in the cast
    for place in (0, 4095, 4096, 8999):
        for bad in (torch.inf, -torch.inf, torch.nan):
            spoilt = values.clone()
            spoilt[place] = bad
            assert not gpu.get(kernels.pack([gpu.put(spoilt)], out, scratch=scratch)).item()
    assert gpu.get(kernels.pack([gpu.put(values[:0])], gpu.garbage(0, torch.float32))).item()


@pytest.mark.pairwise
@pytest.mark.parametrize(("source", "target"), pairs(FLOATS))
def test_pack_says_whether_all_is_below_a_limit(gpu: Gpu, source: torch.dtype, target: torch.dtype) -> None:
    for place in (0, 4095, 4096, 8999):
        for value, fits in ((3.5, True), (4.0, False), (-4.0, False), (torch.nan, False)):
            x = torch.ones(9000, dtype=source)
            x[place] = value
            answer = kernels.pack([gpu.put(x)], gpu.garbage(9000, target), 2.0, limit=8.0)
            assert bool(gpu.get(answer).item()) == fits


@pytest.mark.pairwise
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("num_bits", [0, 64])
@pytest.mark.parametrize("spoilt", [False, True])
def test_pack_with_flags(gpu: Gpu, target: torch.dtype, num_bits: int, spoilt: bool) -> None:
    arrays = [
        interesting(size, FLOATS[i % 4], i).nan_to_num_(1.0, 1.0, 1.0).clamp_(-3, 3) for i, size in enumerate(SIZES)
    ]
    has_data = [i % 3 != 1 for i in range(len(SIZES))]
    bits = torch.arange(num_bits) % 3 == 0 if num_bits else None
    if spoilt:
        arrays[-1 if has_data[-1] else -2][-1] = 100.0
    total, num_flags, scratch = sum(SIZES), len(SIZES) + 1 + 2 * num_bits, kernels.Scratch()
    wanted, wanted_flags = torch.empty(total, dtype=target), torch.empty(num_flags, dtype=target)
    kernels.pack_flagged(arrays, has_data, wanted, wanted_flags, bits, 2.0, limit=100.0)
    on_gpu, bits_there = gpu.puts(arrays), None if bits is None else gpu.put(bits)
    for _ in range(2):
        out, flags = gpu.garbage(total, target), gpu.garbage(num_flags, target)
        kernels.pack_flagged(on_gpu, has_data, out, flags, bits_there, 2.0, limit=100.0, scratch=scratch)
        assert_same_bits(gpu.get(out), wanted)
        assert_same_bits(gpu.get(flags), wanted_flags)


def test_pack_hundreds_of_arrays(gpu: Gpu) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = torch.randint(0, 70, (500,), generator=generator).tolist()
    arrays = [torch.randn(size, generator=generator).to(FLOATS[i % 4]) for i, size in enumerate(sizes)]
    wanted = torch.empty(sum(sizes))
    kernels.pack(arrays, wanted, 0.5)
    on_gpu, scratch = gpu.puts(arrays), kernels.Scratch()
    for some in (on_gpu, on_gpu, on_gpu[1:] + on_gpu[:1]):  # the second time the table is there already
        out = gpu.garbage(sum(sizes), torch.float32)
        kernels.pack(some, out, 0.5, scratch=scratch)
        cut = 0 if some is on_gpu else sizes[0]
        assert_same_bits(gpu.get(out), torch.cat([wanted[cut:], wanted[:cut]]))


def test_pack_reads_scale_and_condition_on_the_device(gpu: Gpu) -> None:
    values = torch.randn(1000)
    out = gpu.put(torch.zeros(1000))
    scale = gpu.put(torch.tensor(0.37))
    kernels.pack([gpu.put(values)], out, scale, unless=gpu.put(torch.tensor(True)))
    assert not gpu.get(out).any()
    kernels.pack([gpu.put(values)], out, scale, unless=gpu.put(torch.tensor(False)))
    assert_same_bits(gpu.get(out), values * torch.tensor(0.37))
    back = gpu.garbage(1000, torch.float32)
    kernels.unpack(gpu.put(values), [back], scale)
    assert_same_bits(gpu.get(back), values * torch.tensor(0.37))


@pytest.mark.pairwise
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "product", "band", "bor", "bxor"])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_reduce(gpu: Gpu, dtype: torch.dtype, op: str) -> None:
    if (op == "mean" and not dtype.is_floating_point) or (op.startswith("b") and dtype.is_floating_point):
        pytest.skip("integers have no mean, floats no bits")
    shapes = ((0, 2, 0), (1, 1, 0), (1030, 3, 0), (1029, 4, 1), (300, 9, 0), (5003, 2, 0), (1030, 33, 1))
    for count, num_inputs, gap in shapes:
        memory = interesting((count + 1) * num_inputs, torch.float64, count)
        if not dtype.is_floating_point:
            memory = torch.nan_to_num(memory).clamp(-1e9, 1e9)
        inputs = pieces_of(memory.to(dtype), [count] * num_inputs, gap)
        wanted = torch.empty(count, dtype=dtype)
        kernels.reduce(wanted, inputs, op)
        out = gpu.garbage(count, dtype)
        on_gpu = gpu.puts(inputs)
        kernels.reduce(out, on_gpu, op)
        assert_same_bits(gpu.get(out), wanted)
        kernels.reduce(on_gpu[-1], on_gpu, op)
        assert_same_bits(gpu.get(on_gpu[-1]), wanted)


@pytest.mark.skipif(not EMULATED, reason="counts the emulator's launches")
def test_a_few_arrays_come_with_the_launch(gpu: Gpu) -> None:
    from tests.emulator.arrays import library

    for num_inputs, wanted in ((2, [1, 1]), (32, [1, 1]), (33, [2, 1])):  # more are sent before, once
        inputs, out, scratch = gpu.puts([torch.ones(100)] * num_inputs), gpu.put(torch.zeros(100)), kernels.Scratch()
        counts = []
        for _ in range(2):
            before = library().emulator_num_launches()
            kernels.reduce(out, inputs, scratch=scratch)
            counts.append(library().emulator_num_launches() - before)
        assert counts == wanted


@pytest.mark.parametrize("dtype", FLOATS)
def test_absmax(gpu: Gpu, dtype: torch.dtype) -> None:
    values = torch.randn(10_000).to(dtype)
    parts = [values[:1], values[1:4000], values[4000:]]
    assert gpu.get(kernels.absmax(gpu.puts(parts))).item() == values.abs().max().float().item()
    values[7000] = -torch.inf
    assert gpu.get(kernels.absmax(gpu.puts(parts))).item() == torch.inf
    values[3] = torch.nan
    assert gpu.get(kernels.absmax(gpu.puts(parts))).isnan()
    assert gpu.get(kernels.absmax([gpu.put(values[:0])])).item() == 0.0


@pytest.mark.pairwise
@pytest.mark.parametrize(("target", "source"), pairs(FLOATS))
@pytest.mark.parametrize("order", ["ascending", "repeated", "descending"])
def test_scatter_add(gpu: Gpu, target: torch.dtype, source: torch.dtype, order: str) -> None:
    generator = torch.Generator().manual_seed(1)
    indices = torch.randperm(3000, generator=generator)[:700].sort().values
    if order == "repeated":
        indices = indices[torch.randint(0, 40, (700,), generator=generator)]
    elif order == "descending":
        indices = indices.flip(0)
    indices = indices.to(torch.int32)
    values = torch.randn(700, generator=generator).to(source)
    wanted = torch.randn(3000, generator=generator).to(target)
    out = gpu.put(wanted)
    kernels.scatter_add(wanted, indices, values, 0.25)
    kernels.scatter_add(out, gpu.put(indices), gpu.put(values), gpu.put(torch.tensor(0.25)))
    assert_same_bits(gpu.get(out), wanted)


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1])
def test_scatter_add_outside(gpu: Gpu, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = gpu.put(torch.zeros(10))
    indices, values = gpu.put(torch.tensor([0, bad, 3], dtype=torch.int32)), gpu.put(torch.ones(3))
    kernels.scatter_add(out, indices, values)
    assert not gpu.get(out).any()  # nothing was written
    with pytest.raises(ValueError, match=rf"indices\[1\] is {bad}, wanted 0 <= index < 10"):
        kernels.absmax([out])
    assert gpu.get(kernels.absmax([out])).item() == 0.0  # raised once
