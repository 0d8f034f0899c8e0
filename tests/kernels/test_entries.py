"""Messages of entries: what travels, the verdict and the sum against plain torch, a GPU against the CPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from pycomm import kernels
from pycomm.kernels import EntryLayout, Gathered, Taken
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits

__all__ = ["gpu"]

SIZES = [30, 1, 6000, 700, 2500]
COUNTS = [3, 1, 41, 7, 12]
LIMIT, COUNT = sum(SIZES), sum(COUNTS)
BITS = 5


class Host(Gpu):
    """The CPU, with a GPU's interface."""

    def put(self, tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
        return tensor.clone()

    def get(self, array: torch.Tensor) -> torch.Tensor:
        return array.clone()


@dataclass
class Rank:
    """What one rank has selected."""

    flat: torch.Tensor
    velocity: torch.Tensor
    indices: torch.Tensor
    finite: torch.Tensor
    fingerprint: torch.Tensor | None
    keeps: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        return self.flat[self.indices.long()]

    def taken(self, at: Gpu, flat: Any, velocity: Any) -> Taken:
        put = lambda tensor: None if tensor is None else at.put(tensor)  # noqa: E731
        largest = at.put(self.values.abs().max().float().reshape(1)) if self.flat.dtype == torch.float32 else None
        return Taken(
            put(self.values),
            put(self.indices),
            flat,
            put(self.finite),
            largest,
            velocity,
            put(self.keeps),
            put(self.fingerprint),
        )


def ranks_of(number: int, dtype: torch.dtype, scale: float = 1.0) -> list[Rank]:
    generator = torch.Generator().manual_seed(number)
    ranks = []
    for _ in range(number):
        flat = torch.randn(LIMIT, generator=generator, dtype=dtype) * scale
        begins = itertools.accumulate(SIZES, initial=0)
        parts = [
            begin + torch.randperm(size, generator=generator)[:k].sort().values
            for begin, size, k in zip(begins, SIZES, COUNTS, strict=False)
        ]
        velocity = torch.randn(LIMIT, generator=generator, dtype=dtype)
        fingerprint = torch.tensor([True, False, True, True, False])
        ranks.append(
            Rank(flat, velocity, torch.cat(parts).int(), torch.ones(len(SIZES), dtype=torch.bool), fingerprint)
        )
    return ranks


@dataclass
class Exchanged:
    """What one step over some ranks leaves, on the CPU."""

    layout: EntryLayout
    messages: torch.Tensor
    left: list[torch.Tensor]
    velocities: list[torch.Tensor]
    indices: torch.Tensor
    verdict: torch.Tensor
    gathered: Gathered = field(repr=False)

    @property
    def finite(self) -> bool:
        return bool(self.verdict[self.layout.verdict_places(self.gathered.num_ranks)[0]])

    def piece(self, which: int) -> torch.Tensor:
        """From the ``which``-th place of the verdict to the next."""
        places = (*self.layout.verdict_places(self.gathered.num_ranks),)
        return self.verdict[places[which] : places[which + 1]]

    @property
    def sources(self) -> list[int]:
        return [int(source) for source in self.piece(1).view(torch.int64)]

    @property
    def used(self) -> list[int]:
        return [int(flag) for flag in self.piece(2)]

    @property
    def differing(self) -> list[int]:
        return [int(flag) for flag in self.piece(3)[:BITS]]


def exchange(
    ranks: list[Rank], half: bool = False, at: Gpu | None = None, factor: Any = 1.0, unused: tuple[int, ...] = ()
) -> Exchanged:
    at = Host() if at is None else at
    dtype = ranks[0].flat.dtype
    layout = EntryLayout(len(SIZES), BITS, COUNT, LIMIT, str(dtype).removeprefix("torch."), half)
    size = len(ranks)
    verdict = at.put(torch.full((layout.verdict_places(size)[-1],), 0xA5, dtype=torch.uint8))
    indices = at.put(torch.full((size * COUNT,), -1, dtype=torch.int32))
    messages, left, velocities = [], [], []
    for rank in ranks:
        message = at.put(torch.zeros(layout.num_bytes, dtype=torch.uint8))
        flat, velocity = at.put(rank.flat), at.put(rank.velocity)
        kernels.pack_entries(message, rank.taken(at, flat, velocity), Gathered(layout, size, None, indices, verdict))
        packed = at.get(message)
        packed[list(unused)] = 0
        messages.append(packed)
        left.append(at.get(flat))
        velocities.append(at.get(velocity))
    together = torch.cat(messages)
    gathered = Gathered(layout, size, at.put(together), indices, verdict)
    kernels.unpack_entries(gathered, factor, torch.finfo(dtype).max)
    verdict_bytes = at.get(verdict)
    verdict_bytes[:8] = 0
    return Exchanged(layout, together, left, velocities, at.get(indices), verdict_bytes, gathered)


def summed(
    found: Exchanged, ranks: list[Rank], half: bool, factor: float, dtype: torch.dtype, limit: int = LIMIT
) -> torch.Tensor:
    """The sum in the order of the ranks, each term and each sum rounded."""
    wide = ranks[0].flat.dtype
    out = torch.zeros(limit, dtype=wide)
    for rank, left in zip(ranks, found.left, strict=True):
        places = rank.indices.long()
        sent = rank.values - left[places] if half else rank.values  # exact: the error is what rounding took
        out[places] += sent * torch.tensor(factor, dtype=wide)
    return out.to(dtype)


CASES = [(torch.float32, False), (torch.float32, True), (torch.float64, False)]


@pytest.mark.parametrize(("dtype", "half"), CASES)
@pytest.mark.parametrize("size", [1, 3])
def test_on_cpu(dtype: torch.dtype, half: bool, size: int) -> None:
    ranks = ranks_of(size, dtype)
    found = exchange(ranks, half)
    assert torch.equal(found.indices, torch.cat([rank.indices for rank in ranks]))
    assert (found.finite, found.sources, found.used, found.differing) == (
        True,
        [0] * size,
        [1] * len(SIZES),
        [0] * BITS,
    )
    for rank, left, velocity in zip(ranks, found.left, found.velocities, strict=True):
        places = rank.indices.long()
        others = torch.ones(LIMIT, dtype=torch.bool)
        others[places] = False
        assert torch.equal(left[others], rank.flat[others])
        most = rank.values.abs().max() * 2**-11 if half else 0.0
        assert left[places].abs().max() <= most
        assert bool(left[places].any()) == half
        assert torch.equal(velocity[others], rank.velocity[others])
        assert not velocity[places].any()
    for out_dtype in (dtype, torch.bfloat16):
        out = torch.full((LIMIT,), math.nan, dtype=out_dtype)
        kernels.add_entries(found.gathered, 0.25, out)
        assert_same_bits(out, summed(found, ranks, half, 0.25, out_dtype))


def test_scale_of_half_values() -> None:
    for scale in (1e-30, 1e-44, 1e30, 0.0):
        ranks = ranks_of(2, torch.float32, scale)
        found = exchange(ranks, half=True)
        assert found.finite
        out = torch.empty(LIMIT)
        kernels.add_entries(found.gathered, 1.0, out)
        wanted = summed(found, ranks, False, 1.0, torch.float32)
        assert float((out - wanted).abs().max()) <= max(2.0**-11 * float(wanted.abs().max()), 1e-44)


def test_verdict() -> None:
    ranks = ranks_of(3, torch.float32)
    ranks[1].finite[2:4] = False
    assert ranks[2].fingerprint is not None
    ranks[2].fingerprint = ~ranks[2].fingerprint
    ranks[0].fingerprint = None
    found = exchange(ranks, unused=(0, 4))
    assert (found.finite, found.sources, found.used) == (False, [0, 3, 0], [0, 1, 1, 1, 0])
    assert found.differing == [1] * BITS


def test_sums_that_overflow() -> None:
    ranks = ranks_of(3, torch.float32)
    for rank in ranks:
        rank.flat[rank.indices[4]] = -1.2e38
    assert not exchange(ranks).finite
    assert exchange(ranks, factor=0.5).finite
    ranks[1].flat[ranks[1].indices[7]] = math.nan
    assert not exchange(ranks, factor=0.0).finite


def test_unused_parameters_keep_their_state() -> None:
    ranks = ranks_of(2, torch.float32)
    found = exchange(ranks)
    now, before = torch.ones(LIMIT), torch.full((LIMIT,), 2.0)
    used = torch.tensor([True, False, True, True, False])
    ends = torch.tensor(SIZES).cumsum(0)
    out = before  # as it is with error feedback
    kernels.add_entries(found.gathered, 1.0, out, [(now, before.clone())], used=used, ends=ends)
    assert torch.equal(now, torch.where(used, 1.0, 2.0).repeat_interleave(torch.tensor(SIZES)))
    assert_same_bits(out, summed(found, ranks, False, 1.0, torch.float32))


def test_entries_that_keep_their_velocity() -> None:
    rank = ranks_of(1, torch.float32)[0]
    rank = replace(rank, keeps=torch.arange(COUNT) % 2 == 0)
    places = rank.indices.long()
    velocity = exchange([rank]).velocities[0]
    assert torch.equal(velocity[places[::2]], rank.velocity[places[::2]])
    assert not velocity[places[1::2]].any()


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
    with pytest.raises(ValueError, match="more indices than count|not hold ascending indices"):
        kernels.unpack_entries(replace(gathered, messages=torch.full_like(message, 255)), 1.0, 1.0)
    with pytest.raises(ValueError, match="out has 7 elements, wanted"):
        kernels.add_entries(gathered, 1.0, torch.zeros(7))
    with pytest.raises(TypeError, match="half is True with float64 sums"):
        EntryLayout(1, 1, 1, 1, "float64", True)
    with pytest.raises(ValueError, match="count is 0, wanted 1 <= count"):
        EntryLayout(1, 1, 0, 1, "float32", False)


@pytest.mark.pairwise
@requires_gpu
@pytest.mark.parametrize(("dtype", "half"), CASES)
@pytest.mark.parametrize("size", [1, 3])
def test_gpu(gpu: Gpu, dtype: torch.dtype, half: bool, size: int) -> None:
    ranks = ranks_of(size, dtype)
    for rank in ranks[1:]:
        rank.keeps = torch.arange(COUNT) % 3 == 0
    wanted, found = exchange(ranks, half), exchange(ranks, half, gpu, gpu.put(torch.tensor(1.0)))
    for name in ("messages", "indices"):
        assert torch.equal(getattr(wanted, name), getattr(found, name)), name
    assert torch.equal(wanted.verdict[: borders_at(wanted)], found.verdict[: borders_at(found)])
    assert borders_of(found) == [
        torch.searchsorted(rank.indices, torch.arange(0, LIMIT, 4096)).tolist() for rank in ranks
    ]
    for one, other in zip(wanted.left + wanted.velocities, found.left + found.velocities, strict=True):
        assert_same_bits(other, one)
    for out_dtype in (torch.float32, torch.float16, torch.float64):
        out, on_gpu = torch.empty(LIMIT, dtype=out_dtype), gpu.garbage(LIMIT, out_dtype)
        kernels.add_entries(wanted.gathered, 0.3, out)
        kernels.add_entries(found.gathered, 0.3, on_gpu)
        assert_same_bits(gpu.get(on_gpu), out)


def borders_at(found: Exchanged) -> int:
    return found.layout.verdict_places(found.gathered.num_ranks)[4]


def borders_of(found: Exchanged) -> list[list[int]]:
    """For each rank, how many of its entries come before each tile."""
    size, tiles = found.gathered.num_ranks, -(-LIMIT // 4096)
    return found.verdict[borders_at(found) :].view(torch.int32)[: size * tiles].view(size, tiles).tolist()


@requires_gpu
@pytest.mark.parametrize("places", [[0], [40_964], [4095, 4096, 4097], [5 * 4096], [0, 40_964]])
def test_gpu_finds_the_entries_of_every_tile(gpu: Gpu, places: list[int]) -> None:
    """Also where most tiles have none, and next to their borders."""
    limit = 10 * 4096 + 5
    layout = EntryLayout(1, 0, len(places), limit, "float32", False)
    verdict = gpu.put(torch.full((layout.verdict_places(1)[-1],), 0xA5, dtype=torch.uint8))
    message, indices = gpu.put(torch.zeros(layout.num_bytes, dtype=torch.uint8)), torch.tensor(places).int()
    gathered = Gathered(layout, 1, message, gpu.put(torch.zeros_like(indices)), verdict)
    values, flat = gpu.put(torch.arange(1.0, 1 + len(places))), gpu.put(torch.zeros(limit))
    taken = kernels.Taken(values, gpu.put(indices), flat, gpu.put(torch.tensor([True])))
    kernels.pack_entries(message, taken, gathered)
    kernels.unpack_entries(gathered, 1.0, 1e9)
    out = gpu.garbage(limit, torch.float32)
    kernels.add_entries(gathered, 1.0, out)
    wanted = torch.zeros(limit).index_put((indices.long(),), torch.arange(1.0, 1 + len(places)))
    assert torch.equal(gpu.get(out), wanted)


def check_that_state_is_put_back(at: Gpu, finite: bool) -> None:
    ranks = ranks_of(3, torch.float32)
    ranks[2].finite[1] = finite
    found = exchange(ranks, at=at)
    assert (found.finite, found.sources) == (finite, [0, 0, 0 if finite else 2])
    used = torch.tensor([True, False, True, True, False])
    ends, sources = at.put(torch.tensor(SIZES).cumsum(0)), at.put(torch.full((3,), 77))
    states = [torch.full((LIMIT,), float(value)) for value in (1, 2, 3, 4)]
    now, before, other, other_before = at.puts(states)
    kernels.add_entries(
        found.gathered,
        2.0,
        before,
        [(now, before), (other, other_before)],
        finite=at.put(torch.tensor([finite])),
        used=at.put(used),
        ends=ends,
        last_sources=sources,
    )
    stays = used.repeat_interleave(torch.tensor(SIZES)) & finite
    assert torch.equal(at.get(now), torch.where(stays, 1.0, 2.0))
    assert torch.equal(at.get(other), torch.where(stays, 3.0, 4.0))
    assert at.get(sources).tolist() == ([77] * 3 if finite else [0, 0, 2])
    wanted = summed(found, ranks, False, 2.0 if finite else math.nan, torch.float32)
    assert_same_bits(at.get(before), wanted)


@pytest.mark.parametrize("finite", [True, False])
def test_state_is_put_back(finite: bool) -> None:
    """If a step is not finite, or where a parameter is unused; out is one of the old states."""
    check_that_state_is_put_back(Host(), finite)


@requires_gpu
@pytest.mark.parametrize("finite", [True, False])
def test_gpu_puts_state_back(gpu: Gpu, finite: bool) -> None:
    check_that_state_is_put_back(gpu, finite)


@requires_gpu
def test_gpu_reports_bad_messages(gpu: Gpu) -> None:
    found = exchange(ranks_of(1, torch.float32), at=gpu)
    spoilt = replace(found.gathered, messages=gpu.put(torch.full_like(found.messages, 255)))
    kernels.unpack_entries(spoilt, 1.0, 1.0)
    gpu.get(spoilt.verdict)
    with pytest.raises(ValueError, match="unpack_indices: words were not made by pack_indices"):
        kernels.unpack_entries(found.gathered, 1.0, 1.0)
