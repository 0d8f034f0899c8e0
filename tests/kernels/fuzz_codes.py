"""Valid calls, and some of data that is not, of the kernels that code: positions, small integers, signs and chunks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pycomm import kernels
from tests.kernels import test_chunks, test_indices, test_quantize, test_signs
from tests.kernels.fuzz_arrays import Slot, some_size, some_values
from tests.kernels.fuzz_calls import (
    Call,
    Output,
    Read,
    Refusal,
    Wanted,
    array,
    as_tensor,
    assert_close,
    expect,
    number_of,
    output,
    some_scale,
)
from tests.kernels.fuzz_memory import Rng
from tests.kernels.reference import assert_same_bits

LARGEST = test_indices.LARGEST
_CONFIGS = [(64, 7, 4), (256, 127, 8), (128, 1, 2), (192, 3, 8), (2112, 5, 4), (4096, 100, 8), (2**40, 2, 4)]


def _some_indices(rng: Rng) -> tuple[int, torch.Tensor]:
    limit = rng.choice([1, 2, 63, 64, 1000, LARGEST, rng.randint(1, LARGEST), rng.randint(1, 5000)])
    count = rng.choice([1, 2, 31, 32, 33, rng.randint(1, 300)])
    return limit, test_indices.some_indices(limit, count, rng.torch_seed())


def _words(indices: torch.Tensor, limit: int) -> torch.Tensor:
    words = test_indices.words_of(indices.tolist(), limit)
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))


def pack_indices(rng: Rng) -> Call:
    limit, values = _some_indices(rng)
    count = len(values)
    if rng.chance(0.25):
        values[rng.randrange(count)] = rng.choice([-1, min(limit, LARGEST), -(2**31), LARGEST, 0])
    given = rng.chance(0.5)
    indices = array("indices", values, aligned=True, sized=False, flat=not given)
    out = output(rng, "words", kernels.packed_words(limit, count), torch.int32, aligned=True) if given else None

    def wanted(read: Read) -> Wanted:
        words = _words(read(indices), limit)
        if out is not None:
            return Wanted([Output(out, words)])
        return Wanted(result=lambda result: assert_same_bits(as_tensor(result), words))

    def faults(read: Read) -> list[Refusal]:
        held = read(indices).long()
        bad = (held < 0) | (held >= limit) | (held.diff(prepend=held[:1]) < 0)
        return [Refusal(("indices",), (ValueError,), spoils=True)] if bool(bad.any()) else []

    return Call("pack_indices", {"indices": indices, "limit": limit, "out": out}, wanted, faults)


def unpack_indices(rng: Rng) -> Call:
    """Of words that pack_indices makes, or of these with a few bits changed."""
    limit, values = _some_indices(rng)
    count = len(values)
    coded = _words(values, limit)
    if rng.chance(0.3):
        coded[rng.randrange(len(coded))] = rng.choice([0, -1, 1, rng.randrange(-(2**31), 2**31)])
    words = array("words", coded, aligned=True)
    out = output(rng, "indices", count, torch.int32, aligned=True) if rng.chance(0.5) else None

    def decoded(read: Read) -> torch.Tensor | None:
        found = decoded_words(read(words), limit, count)
        return None if found is None else torch.tensor(found, dtype=torch.int32)

    def wanted(read: Read) -> Wanted:
        numbers = decoded(read)
        assert numbers is not None
        if out is not None:
            return Wanted([Output(out, numbers)])
        return Wanted(result=lambda result: assert_same_bits(as_tensor(result), numbers))

    def faults(read: Read) -> list[Refusal]:
        return [] if decoded(read) is not None else [Refusal(("words",), (ValueError,), spoils=True)]

    return Call("unpack_indices", {"words": words, "limit": limit, "count": count, "out": out}, wanted, faults)


def decoded_words(words: torch.Tensor, limit: int, count: int) -> list[int] | None:
    """What pack_indices must have been given; ``None`` if it makes no such words."""
    low = 0
    while limit >= count << (low + 1):
        low += 1
    split = -(-count * low // 32)
    halves = [
        sum((word & 0xFFFFFFFF) << (32 * w) for w, word in enumerate(part.tolist()))
        for part in (words[:split], words[split:])
    ]
    places = [bit for bit in range(halves[1].bit_length()) if halves[1] >> bit & 1]
    if len(places) != count:
        return None
    found = [(place - m) << low | (halves[0] >> (m * low) & ((1 << low) - 1)) for m, place in enumerate(places)]
    ascending = all(a <= b for a, b in zip([0, *found], [*found, limit - 1], strict=True))
    return found if ascending else None


def _config(rng: Rng) -> kernels.Quantization:
    return kernels.Quantization(*rng.choice(_CONFIGS), rng.choice(["max", "euclidean"]))


def _small(config: kernels.Quantization, count: int) -> kernels.Quantization:
    """The same for so few elements, with blocks that references can hold."""
    return kernels.Quantization(
        min(config.block, -(-max(count, 1) // 64) * 64), config.levels, config.bits, config.norm
    )


def quantize(rng: Rng) -> Call:
    config, size = _config(rng), some_size(rng)
    values = some_values(rng, size, torch.float32, finite=rng.chance(0.8)) * rng.choice([1.0, 1e-29, 1e15])
    if config.norm == "euclidean":
        values = torch.where(values.abs() < 1e-12, torch.zeros_like(values), values.clamp(-1e15, 1e15))
    given = rng.chance(0.5)
    x = array("x", values, aligned=True, sized=False, flat=not given)
    out = None
    if given:
        scales = output(rng, "scales", config.num_blocks(size), torch.float32, aligned=True)
        out = scales, output(rng, "codes", config.code_bytes(size), torch.uint8)
    numbers = torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(2)])
    seed = array("seed", numbers, aligned=True) if rng.chance(0.5) else None
    left = output(rng, "remainder", size, torch.float32, aligned=True) if rng.chance(0.5) else None

    def wanted(read: Read) -> Wanted:
        held = read(x).numpy()
        fair = _small(config, size)
        sizes = np.abs(held[held != 0])
        if config.norm == "euclidean" and not ((sizes >= 1e-12) & (sizes <= 1e15)).all():
            # Squares are added as floats: what comes of what lies where another array was may be anything.
            return Wanted(unknown=[slot for slot in (*(out or ()), left) if slot is not None])
        with np.errstate(all="ignore"):
            scales = torch.from_numpy(test_quantize.scales_of(held, fair))
        random = None if seed is None else tuple(read(seed).tolist())
        return _quantized(held, fair, random, scales, out, left)

    arguments = {"x": x, "config": config, "out": out, "seed": seed, "remainder": left}
    return Call("quantize", arguments, wanted, shared=[] if left is None else [(left, x, 0)])


def _quantized(
    x: np.ndarray,
    config: kernels.Quantization,
    seed: Any,
    scales: torch.Tensor,
    out: tuple[Slot, Slot] | None,
    left: Slot | None,
) -> Wanted:
    """Codes and remainders follow from the very scales that were found, which another order of a sum may change."""
    rtol = 0.0 if config.norm == "max" else 1e-5

    def codes(found: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(test_quantize.packed(test_quantize.reference(x, config, seed, found)[0], config.bits))

    def remainder(found: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(test_quantize.reference(x, config, seed, found)[1])

    if not np.isfinite(x).all() or not bool(scales.isfinite().all()):
        written = [slot for slot in (*(out or ()), left) if slot is not None]
        finite = scales.isfinite()

        def check_scales(result: Any) -> None:
            found = as_tensor(result[0]).flatten() if out is None else out[0].read()
            expect(bool((found.isfinite() == finite).all()), f"scales are {found}, finite should be {finite}")

        return Wanted(result=check_scales, unknown=written)
    if out is None:

        def check_all(result: Any) -> None:
            assert_close(as_tensor(result[0]), scales, rtol)
            assert_same_bits(as_tensor(result[1]), codes(as_tensor(result[0]).numpy()))

        return Wanted(result=check_all, unknown=[] if left is None else [left])
    outputs = [Output(out[0], scales, rtol), Output(out[1], lambda: codes(out[0].read().numpy()))]
    outputs += [] if left is None else [Output(left, lambda: remainder(out[0].read().numpy()))]
    return Wanted(outputs)


def _levels(codes: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The whole numbers that codes are, as float32."""
    shifts = torch.arange(0, 8, bits)
    raw = (codes.long()[:, None] >> shifts & ((1 << bits) - 1)).flatten()[:count]
    return torch.where(raw >> (bits - 1) == 1, raw - (1 << bits), raw).float()


def dequantize(rng: Rng) -> Call:
    config, size, parts = _config(rng), some_size(rng), rng.choice([1, 1, 2, 3, 6])
    scales, codes = [], []
    for p in range(parts):
        of_blocks = some_values(rng, config.num_blocks(size), torch.float32).abs()
        scales.append(array(f"scales[{p}]", of_blocks, aligned=True))
        codes.append(array(f"codes[{p}]", some_values(rng, config.code_bytes(size), torch.uint8)))
    out = output(rng, "out", size, torch.float32, aligned=True, sized=False)
    scale = some_scale(rng)

    def wanted(read: Read) -> Wanted:
        fair = _small(config, size)
        total = torch.zeros(size)
        for of_blocks, code in zip(scales, codes, strict=True):
            each = read(of_blocks).repeat_interleave(fair.block)[:size]
            total = total + _levels(read(code), config.bits, size) * each
        return Wanted([Output(out, total * torch.tensor(number_of(scale, read), dtype=torch.float32))])

    arguments = {"scales": scales, "codes": codes, "config": config, "out": out, "scale": scale}
    return Call("dequantize", arguments, wanted, paired=("scales", "codes"))


def requantize(rng: Rng) -> Call:
    config, size, parts = replace(_config(rng), norm="max"), some_size(rng), rng.choice([1, 1, 2, 3, 6])
    scales, codes = [], []
    for p in range(parts):
        of_blocks = some_values(rng, config.num_blocks(size), torch.float32).abs()
        scales.append(array(f"scales[{p}]", of_blocks, aligned=True))
        codes.append(array(f"codes[{p}]", some_values(rng, config.code_bytes(size), torch.uint8)))
    to_scales = output(rng, "out[0]", config.num_blocks(size), torch.float32, aligned=True)
    out = to_scales, output(rng, "out[1]", config.code_bytes(size), torch.uint8)
    numbers = torch.tensor([rng.randrange(-(2**63), 2**63) for _ in range(2)])
    seed = array("seed", numbers, aligned=True) if rng.chance(0.5) else None
    left = output(rng, "remainder", size, torch.float32, aligned=True) if rng.chance(0.5) else None

    def wanted(read: Read) -> Wanted:
        fair, total = _small(config, size), torch.zeros(size)
        for of_blocks, code in zip(scales, codes, strict=True):
            each = read(of_blocks).repeat_interleave(fair.block)[:size]
            total = total + _levels(read(code), config.bits, size) * each
        held, random = total.numpy(), None if seed is None else tuple(read(seed).tolist())
        with np.errstate(all="ignore"):
            found = torch.from_numpy(test_quantize.scales_of(held, fair))
        if not np.isfinite(held).all() or not bool(found.isfinite().all()):
            return Wanted(unknown=[*out] if left is None else [*out, left])
        what = _quantized(held, fair, random, found, out, None)
        if left is not None:
            added = torch.from_numpy(test_quantize.reference(held, fair, random, found.numpy())[1])
            what.outputs.append(Output(left, read(left) + added))
        return what

    arguments = {"scales": scales, "codes": codes, "config": config, "out": out, "seed": seed, "remainder": left}
    return Call("requantize", {**arguments, "count": size}, wanted, paired=("scales", "codes"))


def _magnitude(rng: Rng) -> torch.Tensor:
    return torch.tensor([rng.choice([0.7, 0.0, 1e-40, math.inf, math.nan, 1e30, rng.random()])])


def _signed(magnitude: torch.Tensor, words: torch.Tensor, count: int) -> torch.Tensor:
    return torch.from_numpy(test_signs.signed(magnitude.item(), words.numpy(), count))


def pack_signs(rng: Rng) -> Call:
    size, given = some_size(rng), rng.chance(0.5)
    x = array("x", some_values(rng, size, torch.float32), aligned=True, sized=False, flat=not given)
    magnitude = array("magnitude", _magnitude(rng), aligned=True)
    out = output(rng, "words", kernels.sign_words(size), torch.int32, aligned=True) if given else None
    left = output(rng, "remainder", size, torch.float32, aligned=True) if rng.chance(0.5) else None

    def wanted(read: Read) -> Wanted:
        words = torch.from_numpy(test_signs.words_of(read(x).numpy()))
        outputs = [] if left is None else [Output(left, read(x) - _signed(read(magnitude), words, size))]
        if out is not None:
            return Wanted([*outputs, Output(out, words)])
        return Wanted(outputs, lambda result: assert_same_bits(as_tensor(result), words))

    arguments = {"x": x, "magnitude": magnitude, "out": out, "remainder": left}
    return Call("pack_signs", arguments, wanted, shared=[] if left is None else [(left, x, 0)])


def unpack_signs(rng: Rng) -> Call:
    size, parts = some_size(rng), rng.choice([1, 1, 2, 3, 6])
    words, magnitudes = [], []
    for p in range(parts):
        words.append(array(f"words[{p}]", some_values(rng, kernels.sign_words(size), torch.int32), aligned=True))
        magnitudes.append(array(f"magnitudes[{p}]", _magnitude(rng), aligned=True))
    out = output(rng, "out", size, torch.float32, aligned=True, sized=False)
    scale = some_scale(rng)

    def wanted(read: Read) -> Wanted:
        total = torch.zeros(size)
        for one, magnitude in zip(words, magnitudes, strict=True):
            total = total + _signed(read(magnitude), read(one), size)
        return Wanted([Output(out, total * torch.tensor(number_of(scale, read), dtype=torch.float32))])

    arguments = {"words": words, "magnitudes": magnitudes, "out": out, "scale": scale}
    return Call("unpack_signs", arguments, wanted, paired=("words", "magnitudes"))


_CHUNKS = [(3, 16, 2), (5, 64, 4), (1, 1, 2), (64, 64, 8), (9, 4096, 2), (200, 65536, 4)]


def _words_of_chunks(rng: Rng, config: kernels.Chunks, size: int) -> torch.Tensor:
    values = some_values(rng, size, torch.float32, finite=rng.chance(0.8))
    return torch.from_numpy(test_chunks.defined(values.numpy(), config)[0])


def pack_chunks(rng: Rng) -> Call:
    config, size, given = kernels.Chunks(*rng.choice(_CHUNKS)), some_size(rng), rng.chance(0.5)
    values = some_values(rng, size, torch.float32, finite=rng.chance(0.8))
    x = array("x", values, aligned=True, sized=False, flat=not given)
    out = output(rng, "words", config.num_words(size), torch.int32, aligned=True) if given else None
    left = output(rng, "remainder", size, torch.float32, aligned=True) if rng.chance(0.5) else None
    decay = rng.choice([1.0, 0.95, 0.5, 0.0, 1, -2.0])

    def wanted(read: Read) -> Wanted:
        held = read(x)
        words, meant = map(torch.from_numpy, test_chunks.defined(held.numpy(), config))
        outputs = []
        if left is not None:
            rest = held - meant
            outputs.append(Output(left, rest * torch.tensor(decay, dtype=torch.float32)))
        if out is not None:
            return Wanted([*outputs, Output(out, words)])
        return Wanted(outputs, lambda result: assert_same_bits(as_tensor(result), words))

    arguments = {"x": x, "config": config, "out": out, "remainder": left, "decay": decay}
    return Call("pack_chunks", arguments, wanted, shared=[] if left is None else [(left, x, 0)])


def unpack_chunks(rng: Rng) -> Call:
    """Of words that pack_chunks makes, or of these with a few bits changed."""
    config, size, parts = kernels.Chunks(*rng.choice(_CHUNKS)), some_size(rng), rng.choice([1, 1, 2, 3, 6])
    coded = [_words_of_chunks(rng, config, size) for _ in range(parts)]
    if size and rng.chance(0.3):
        coded[-1][rng.randrange(len(coded[-1]))] = rng.choice([0, -1, 1, rng.randrange(-(2**31), 2**31)])
    words = [array(f"words[{p}]", one, aligned=True) for p, one in enumerate(coded)]
    out = output(rng, "out", size, torch.float32, aligned=True, sized=False)
    scale = some_scale(rng)

    def decoded(read: Read) -> list[np.ndarray | None]:
        return [test_chunks.decoded(read(one).numpy(), config, size) for one in words]

    def wanted(read: Read) -> Wanted:
        total = torch.zeros(size)
        for values in decoded(read):
            assert values is not None
            total = total + torch.from_numpy(values)
        return Wanted([Output(out, total * torch.tensor(number_of(scale, read), dtype=torch.float32))])

    def faults(read: Read) -> list[Refusal]:
        wrong = any(values is None for values in decoded(read))
        return [Refusal(("words",), (ValueError,), spoils=True)] if wrong else []

    return Call("unpack_chunks", {"words": words, "config": config, "out": out, "scale": scale}, wanted, faults)


def packed_words(rng: Rng) -> Call:
    limit, indices = _some_indices(rng)
    count = len(indices)
    words = len(test_indices.words_of([0] * count, limit))

    def wanted(read: Read) -> Wanted:
        return Wanted(result=lambda result: expect(result == words, f"returned {result}, wanted {words}"))

    return Call("packed_words", {"limit": limit, "count": count}, wanted)


def sign_words(rng: Rng) -> Call:
    count = rng.choice([0, 1, 31, 32, 33, 2**40, rng.randrange(10**6)])
    words = math.ceil(count / 32)

    def wanted(read: Read) -> Wanted:
        return Wanted(result=lambda result: expect(result == words, f"returned {result}, wanted {words}"))

    return Call("sign_words", {"count": count}, wanted)


def set_num_threads(rng: Rng) -> Call:
    count = rng.choice([None, 1, 2, 3])

    def wanted(read: Read) -> Wanted:
        now = torch.get_num_threads() if count is None else count
        return Wanted(result=lambda result: expect(kernels.num_threads() == now, "another number of threads"))

    return Call("set_num_threads", {"count": count}, wanted)
