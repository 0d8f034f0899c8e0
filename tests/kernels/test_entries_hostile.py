"""Kernels of entries and what must not happen to them: bad arguments, messages that hold anything, many ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pycomm import kernels
from pycomm.kernels import EntryLayout, Gathered, Taken
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits
from tests.kernels.test_entries import BITS, COUNT, LIMIT, SIZES, Exchanged, Host, exchange, ranks_of

__all__ = ["gpu"]


def test_bad_arguments() -> None:
    rank = ranks_of(1, torch.float32)[0]
    layout = EntryLayout(len(SIZES), BITS, COUNT, LIMIT, "float32", False)
    message, verdict = (torch.zeros(n, dtype=torch.uint8) for n in (layout.num_bytes, layout.verdict_places(1)[-1]))
    gathered = Gathered(layout, 1, message, torch.zeros(COUNT, dtype=torch.int32), verdict)
    good = rank.taken(Host(), rank.flat.clone(), None)
    with pytest.raises(ValueError, match="message has 3 elements, wanted"):
        kernels.pack_entries(message[:3], good, gathered)
    with pytest.raises(ValueError, match="indices has 3 elements"):
        kernels.pack_entries(message, replace(good, indices=rank.indices[:3]), gathered)
    with pytest.raises(ValueError, match=r"indices\[\d+\] is \d+, wanted"):
        kernels.pack_entries(message, replace(good, indices=rank.indices.flip(0)), gathered)
    with pytest.raises(TypeError, match="flat has dtype float64"):
        kernels.pack_entries(message, replace(good, flat=rank.flat.double()), gathered)
    with pytest.raises(ValueError, match="flat overlaps values"):
        kernels.pack_entries(message, replace(good, flat=rank.flat, values=rank.flat[:COUNT]), gathered)
    with pytest.raises(ValueError, match="more indices than count|no ascending indices"):
        kernels.unpack_entries(replace(gathered, messages=torch.full_like(message, 255)), 1.0, 1.0)
    with pytest.raises(ValueError, match="out has 7 elements, wanted"):
        kernels.add_entries(gathered, 1.0, torch.zeros(7))
    with pytest.raises(TypeError, match="half values of float64"):
        EntryLayout(1, 1, 1, 1, "float64", True)
    with pytest.raises(ValueError, match="count is 0, wanted 1 <= count"):
        EntryLayout(1, 1, 0, 1, "float32", False)


def spoilt_messages(found: Exchanged) -> list[torch.Tensor]:
    """Messages of which the words are not what pack_entries writes: any bytes, an index twice, too few bits."""
    generator = torch.Generator().manual_seed(5)
    begin = found.layout.num_bytes - 8 * (kernels.packed_words(LIMIT, COUNT) // 2)
    spoilt = []
    for kind in range(4):
        message = found.messages.clone()
        words = message[begin:]
        if kind == 0:
            words.fill_(255)
        elif kind == 1:
            words.zero_()
        else:
            words.copy_(torch.randint(0, 256, words.shape, generator=generator, dtype=torch.uint8))
        spoilt.append(message)
    return spoilt


def test_messages_that_hold_anything() -> None:
    found = exchange(ranks_of(1, torch.float32))
    for message in spoilt_messages(found):
        with pytest.raises(ValueError, match="indices"):
            kernels.unpack_entries(replace(found.gathered, messages=message), 1.0, 1.0)


@pytest.mark.parametrize("index", [-1, LIMIT, 2**31 - 1, -(2**31)])
def test_indices_that_lie_outside(index: int) -> None:
    """Nothing is written then."""
    found = exchange(ranks_of(2, torch.float32))
    found.gathered.indices[COUNT + 3] = index
    out = torch.full((LIMIT,), 5.0)
    with pytest.raises(ValueError, match="indices"):
        kernels.add_entries(found.gathered, 1.0, out)
    assert (out == 5.0).all()


@requires_gpu
@pytest.mark.parametrize("index", [-1, LIMIT, 2**31 - 1])
def test_gpu_indices_that_lie_outside(gpu: Gpu, index: int) -> None:
    """Nothing is written out of bounds, and a later call says so."""
    found = exchange(ranks_of(2, torch.float32), at=gpu)
    indices = found.indices.clone()
    indices[COUNT + 3] = index
    room = gpu.put(torch.full((LIMIT,), 5.0))
    kernels.add_entries(replace(found.gathered, indices=gpu.put(indices)), 1.0, room)
    gpu.get(room)
    with pytest.raises(ValueError, match=r"add_entries: indices\[\d+\]"):
        kernels.add_entries(found.gathered, 1.0, room)


@pytest.mark.parametrize("count", [1, 5])
def test_all_elements_are_entries(count: int) -> None:
    layout = EntryLayout(1, 0, count, count, "float64", False)
    message, verdict = (torch.zeros(n, dtype=torch.uint8) for n in (layout.num_bytes, layout.verdict_places(1)[-1]))
    gathered = Gathered(layout, 1, message, torch.zeros(count, dtype=torch.int32), verdict)
    values, flat = torch.arange(1.0, count + 1, dtype=torch.float64), torch.full((count,), 7.0, dtype=torch.float64)
    taken = Taken(values, torch.arange(count, dtype=torch.int32), flat, torch.ones(1, dtype=torch.bool))
    kernels.pack_entries(message, taken, gathered)
    kernels.unpack_entries(gathered, 1.0, 1e300)
    out = torch.empty(count, dtype=torch.float64)
    kernels.add_entries(gathered, 2.0, out)
    assert torch.equal(out, 2.0 * values)
    assert not flat.any()


@requires_gpu
def test_gpu_more_ranks_than_are_looked_up_at_once(gpu: Gpu) -> None:
    ranks = ranks_of(70, torch.float32)
    wanted, found = exchange(ranks), exchange(ranks, at=gpu)
    out, on_gpu = torch.empty(LIMIT), gpu.garbage(LIMIT, torch.float32)
    kernels.add_entries(wanted.gathered, 0.01, out)
    kernels.add_entries(found.gathered, 0.01, on_gpu)
    assert_same_bits(gpu.get(on_gpu), out)
    assert torch.equal(found.verdict, wanted.verdict)
