"""Messages of entries that hold anything: an error, and no byte out of place; and settings at their limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from pycomm import kernels
from pycomm.kernels import EntryLayout, Gathered
from tests.kernels.gpus import Gpu, gpu, requires_gpu
from tests.kernels.reference import assert_same_bits
from tests.kernels.test_entries import LIMIT, Exchanged, Host, Rank, borders_at, exchange, ranks_of, summed

__all__ = ["gpu"]

GUARD, SEEDS = 64, 40


def one_entry(limit: int, *indices: int) -> Rank:
    """A rank with these indices, and no parameters."""
    flat = torch.arange(limit, dtype=torch.float32) + 1.0
    flags = torch.zeros(0, dtype=torch.bool)
    return Rank(flat, flat.clone(), torch.tensor(indices, dtype=torch.int32), flags, None)


def exchanged(ranks: list[Rank], at: Gpu) -> Exchanged:
    """As exchange(), with no parameters and no bits."""
    size, limit, count = len(ranks), len(ranks[0].flat), len(ranks[0].indices)
    layout = EntryLayout(0, 0, count, limit, "float32", False)
    verdict = at.put(torch.zeros(layout.verdict_places(size)[-1], dtype=torch.uint8))
    indices = at.put(torch.full((size * count,), -1, dtype=torch.int32))
    messages, left = [], []
    for rank in ranks:
        message, flat = at.put(torch.zeros(layout.num_bytes, dtype=torch.uint8)), at.put(rank.flat)
        kernels.pack_entries(message, rank.taken(at, flat, None), Gathered(layout, size, None, indices, verdict))
        messages.append(at.get(message))
        left.append(at.get(flat))
    gathered = Gathered(layout, size, at.put(torch.cat(messages)), indices, verdict)
    kernels.unpack_entries(gathered, 1.0, 3e38)
    return Exchanged(layout, torch.cat(messages), left, [], at.get(indices), at.get(verdict), gathered)


def raised(gpu: Gpu, waits_for: Any) -> str | None:
    """What the next call on the GPU raises of an earlier one."""
    gpu.get(waits_for)
    try:
        kernels.absmax([gpu.put(torch.ones(1))])
    except ValueError as error:
        return str(error)
    return None


@dataclass
class Guarded:
    """An array on a device with guards around it."""

    whole: Any
    count: int

    def get(self, at: Gpu) -> torch.Tensor:
        found = at.get(self.whole)
        for guard in (found[:GUARD], found[GUARD + self.count :]):
            assert len(guard) == GUARD
            assert (guard == 55).all()
        return found[GUARD : GUARD + self.count]


def guarded(at: Gpu, values: torch.Tensor) -> tuple[Guarded, Any]:
    guard = torch.full((GUARD,), 55, dtype=values.dtype)
    whole = at.put(torch.cat([guard, values, guard]))
    return Guarded(whole, len(values)), whole[GUARD : GUARD + len(values)]


def spoilt(found: Exchanged, seed: int) -> torch.Tensor:
    """The messages with bytes of the words of one changed; from some seeds on all bytes."""
    generator = torch.Generator().manual_seed(seed)
    messages = found.messages.clone()
    if seed % 8 == 7:
        return torch.randint(0, 256, messages.shape, generator=generator).byte()
    num_words = kernels.packed_words(LIMIT, found.layout.count)
    begin = found.layout.num_bytes - num_words * 4
    for _ in range(seed % 4 + 1):
        byte = int(torch.randint(0, 256, (1,), generator=generator))
        messages[begin + int(torch.randint(0, num_words * 4 - 4, (1,), generator=generator))] = byte
    return messages


def unpacked_on_cpu(found: Exchanged, messages: torch.Tensor) -> torch.Tensor | None:
    indices = torch.full_like(found.indices, -1)
    try:
        kernels.unpack_entries(replace(found.gathered, messages=messages, indices=indices), 1.0, 3e38)
    except ValueError as error:
        if "was not made by pack_entries" in str(error):
            return None
        raise
    return indices


@requires_gpu
@pytest.mark.parametrize("half", [False, True])
def test_gpu_finds_what_the_cpu_does(gpu: Gpu, half: bool) -> None:
    """Of spoilt messages; and what it does all the same stays within its arrays."""
    on_cpu = exchange(ranks_of(2, torch.float32), half)
    layout, refused = on_cpu.layout, 0
    verdict = gpu.put(torch.zeros_like(on_cpu.verdict))
    for seed in range(SEEDS):
        messages = spoilt(on_cpu, seed)
        wanted = unpacked_on_cpu(on_cpu, messages)
        indices, of_indices = guarded(gpu, torch.full_like(on_cpu.indices, LIMIT + 1000 * seed - 9000))
        sums, of_sums = guarded(gpu, torch.zeros(LIMIT))
        gathered = Gathered(layout, 2, gpu.put(messages), of_indices, verdict)
        kernels.unpack_entries(gathered, 1.0, 3e38)
        found = indices.get(gpu)
        fault = raised(gpu, verdict)
        assert (fault is None) == (wanted is not None), (seed, fault)
        kernels.add_entries(gathered, 1.0, of_sums)
        sums.get(gpu)
        raised(gpu, verdict)
        refused += wanted is None
        if wanted is not None:
            assert torch.equal(found, wanted)
    assert SEEDS // 2 < refused < SEEDS


HOSTILE = [
    [5, 4097, 4096, 8191],
    [0, 9000, 1, 9230],
    [-1, 3, 4, 5],
    [-(2**31), 3, 4, 5],
    [3, 4, 5, LIMIT],
    [3, 4, 5, 2**31 - 1],
    [7, 7, 8, 9],
]


@pytest.mark.parametrize("places", HOSTILE)
def test_indices_that_unpack_entries_does_not_write(places: list[int]) -> None:
    found = exchanged([one_entry(LIMIT, 1, 2, 3, 4)] * 2, Host())
    bad = replace(found.gathered, indices=torch.tensor([1, 2, 3, 4, *places], dtype=torch.int32))
    out = torch.full((LIMIT,), 7.0)
    with pytest.raises(ValueError, match=f"indices of rank 1 do not ascend within 0 <= index < {LIMIT}"):
        kernels.add_entries(bad, 1.0, out)
    assert (out == 7.0).all()


@requires_gpu
@pytest.mark.parametrize("places", [places for places in HOSTILE if places[0] != places[1]])
def test_gpu_stays_in_its_tiles(gpu: Gpu, places: list[int]) -> None:
    """What lies where its indices do not say is left out; never is another element written."""
    found = exchanged([one_entry(LIMIT, 1, 2, 3, 4)], gpu)
    bad = replace(found.gathered, indices=gpu.put(torch.tensor(places, dtype=torch.int32)))
    sums, out = guarded(gpu, torch.full((LIMIT,), 7.0))
    kernels.add_entries(bad, 1.0, out)
    result = sums.get(gpu)
    raised(gpu, out)
    here = torch.tensor([place for place in places if 0 <= place < LIMIT])
    others = torch.ones(LIMIT, dtype=torch.bool)
    others[here] = False
    assert not result[others].any()
    assert torch.isin(result[here], torch.arange(6.0)).all()


@requires_gpu
def test_gpu_reports_indices_out_of_a_tile(gpu: Gpu) -> None:
    found = exchanged([one_entry(LIMIT, 1, 2, 3)], gpu)
    out = gpu.put(torch.zeros(LIMIT))
    bad = replace(found.gathered, indices=gpu.put(torch.tensor([1, 5000, 2], dtype=torch.int32)))
    kernels.add_entries(bad, 1.0, out)
    assert "add_entries: indices[1] of a rank is 5000, wanted 0 <= index < 9231" in str(raised(gpu, out))
    assert raised(gpu, out) is None


def twice() -> torch.Tensor:
    """Words of 4 indices below LIMIT, of which one occurs twice."""
    words: torch.Tensor = kernels.pack_indices(torch.tensor([3, 9, 9, 40], dtype=torch.int32), LIMIT)
    return words


def with_words(found: Exchanged, words: torch.Tensor) -> torch.Tensor:
    messages = found.messages.clone()
    at = found.layout.num_bytes - -(-len(words) * 4 // 8) * 8
    messages[at : at + 4 * len(words)] = words.view(torch.uint8)
    return messages


def test_an_index_twice() -> None:
    """It would be added twice and taken out of the sums once."""
    rank = one_entry(LIMIT, 3, 9, 9, 40)
    with pytest.raises(ValueError, match=r"indices\[2\] is 9, as is the one before it, wanted every index once"):
        exchanged([rank], Host())
    found = exchanged([one_entry(LIMIT, 3, 9, 10, 40)], Host())
    with pytest.raises(ValueError, match=r"not made by pack_entries: indices\[2\] is 9, as is the one before it"):
        kernels.unpack_entries(replace(found.gathered, messages=with_words(found, twice())), 1.0, 1.0)


@requires_gpu
def test_gpu_an_index_twice(gpu: Gpu) -> None:
    found = exchanged([one_entry(LIMIT, 3, 9, 10, 40)], gpu)
    kernels.unpack_entries(replace(found.gathered, messages=gpu.put(with_words(found, twice()))), 1.0, 1.0)
    assert "words were not made by pack_indices from 4 indices" in str(raised(gpu, found.gathered.verdict))
    message, flat = gpu.put(torch.zeros_like(found.messages)), gpu.put(torch.ones(LIMIT))
    kernels.pack_entries(message, one_entry(LIMIT, 3, 9, 9, 40).taken(gpu, flat, None), found.gathered)
    assert "indices[2] is 9, wanted 0 <= index < 9231, ascending" in str(raised(gpu, flat))


@requires_gpu
def test_gpu_unpacks_again(gpu: Gpu) -> None:
    """The verdict on other messages of the same layout; nothing was packed in between."""
    ranks = ranks_of(2, torch.float32)
    found = exchange(ranks, at=gpu)
    assert found.finite
    ranks[1].finite[2] = False
    other = exchange(ranks)
    kernels.unpack_entries(replace(found.gathered, messages=gpu.put(other.messages)), 1.0, 3e38)
    assert torch.equal(gpu.get(found.gathered.verdict)[8 : borders_at(found)], other.verdict[8 : borders_at(other)])


def check_many_ranks(at: Gpu, size: int) -> None:
    ranks = [one_entry(100, rank % 97, 98, 99) for rank in range(size)]
    found = exchanged(ranks, at)
    out = at.put(torch.zeros(100))
    kernels.add_entries(found.gathered, 0.25, out)
    assert_same_bits(at.get(out), summed(found, ranks, False, 0.25, torch.float32, 100))


def test_many_ranks() -> None:
    check_many_ranks(Host(), 300)


@requires_gpu
@pytest.mark.parametrize("size", [17, 130, 300])
def test_gpu_many_ranks(gpu: Gpu, size: int) -> None:
    """More than a block looks up at once."""
    check_many_ranks(gpu, size)


def check_all_entries(at: Gpu, limit: int) -> None:
    rank = one_entry(limit, *range(limit))
    found = exchanged([rank] * 3, at)
    out = at.put(torch.zeros(limit))
    kernels.add_entries(found.gathered, 1.0, out)
    assert torch.equal(at.get(out), rank.flat * 3)
    assert not torch.cat(found.left).any()


@pytest.mark.parametrize("limit", [1, 2, 33, 5000])
def test_all_entries(limit: int) -> None:
    check_all_entries(Host(), limit)


@requires_gpu
@pytest.mark.parametrize("limit", [1, 2, 33, 5000])
def test_gpu_all_entries(gpu: Gpu, limit: int) -> None:
    check_all_entries(gpu, limit)


def check_range(at: Gpu) -> None:
    ranks = ranks_of(2, torch.float32)
    ranks[0].flat[ranks[0].indices[3]] = 3e38
    ranks[1].flat[ranks[1].indices[5]] = 3e38
    assert not exchange(ranks, at=at, factor=-1.0).finite
    assert exchange(ranks, at=at, factor=-0.5).finite
    assert not exchange(ranks, at=at, factor=math.nan).finite


def test_range_with_negative_factors() -> None:
    check_range(Host())


@requires_gpu
def test_gpu_range_with_negative_factors(gpu: Gpu) -> None:
    check_range(gpu)


def check_ends(at: Gpu, ends: list[int], num_params: int) -> None:
    """Ends that do not reach the limit, or go back: what is undone is anybody's guess, but within the arrays."""
    layout = EntryLayout(num_params, 0, 1, LIMIT, "float32", False)
    *_, borders, num_bytes = layout.verdict_places(1)
    verdict = torch.zeros(num_bytes, dtype=torch.uint8)
    verdict[borders + 4 :].view(torch.int32).fill_(1)  # the one entry comes before all tiles but the first
    message = at.put(torch.zeros(layout.num_bytes, dtype=torch.uint8))
    gathered = Gathered(layout, 1, message, at.put(torch.zeros(1, dtype=torch.int32)), at.put(verdict))
    arrays = [guarded(at, torch.full((LIMIT,), float(value))) for value in (1, 2, 3)]
    # Behind the ends lie numbers that would look like another's, had they been read.
    (_, out), (now, of_now), (_, before) = arrays
    whole_ends = at.put(torch.tensor([*ends, LIMIT, LIMIT]))
    used = at.put(torch.zeros(num_params + 2, dtype=torch.bool))
    states, flags = [(of_now, before)], used[:num_params]
    kernels.add_entries(gathered, 1.0, out, states, used=flags, ends=whole_ends[:num_params])
    last = ends[-1] if ends else 0
    assert (now.get(at)[last:] == 2.0).all()
    assert (now.get(at)[:last] == 3.0).all()
    for array, _ in arrays:
        array.get(at)


@pytest.mark.parametrize("ends", [[], [0], [100], [100, 5000]])
def test_ends_before_the_limit(ends: list[int]) -> None:
    check_ends(Host(), ends, len(ends))


@requires_gpu
@pytest.mark.parametrize("ends", [[], [0], [100], [100, 5000]])
def test_gpu_ends_before_the_limit(gpu: Gpu, ends: list[int]) -> None:
    check_ends(gpu, ends, len(ends))


def check_flags(at: Gpu) -> None:
    """Of any byte but 0."""
    ranks = ranks_of(1, torch.float32)
    wanted = exchange(ranks, at=at)
    ranks[0].finite = torch.tensor([1, 2, 128, 165, 255], dtype=torch.uint8)
    assert ranks[0].fingerprint is not None
    ranks[0].fingerprint = ranks[0].fingerprint.byte() * 6
    assert torch.equal(exchange(ranks, at=at).messages, wanted.messages)


def test_flags_of_any_byte() -> None:
    check_flags(Host())


@requires_gpu
def test_gpu_flags_of_any_byte(gpu: Gpu) -> None:
    check_flags(gpu)


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="count is 5, wanted 1 <= count <= 4"):
        EntryLayout(1, 1, 5, 4, "float32", False)
    with pytest.raises(TypeError, match="dtype is 3, wanted 'float32' or 'float64'"):
        EntryLayout(1, 1, 1, 1, 3, False)  # type: ignore[arg-type]
    largest = EntryLayout(2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, "float64", False)
    assert largest.num_bytes > 2**32 + 2**34
    with pytest.raises(ValueError, match="num_ranks is 1048577, wanted 1 <= num_ranks <= 1048576"):
        largest.verdict_places(2**20 + 1)
    gathered = Gathered(largest, 2**20, *torch.zeros(3, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match=f"messages has 8 elements, wanted {2**20 * largest.num_bytes}"):
        kernels.unpack_entries(gathered, 1.0, 1.0)


def test_half_values_want_the_largest() -> None:
    rank = ranks_of(1, torch.float32)[0]
    found = exchange([rank], half=True)
    taken = replace(rank.taken(Host(), rank.flat.clone(), None), largest=None)
    with pytest.raises(TypeError, match="largest is None, wanted one float32 to scale half values with"):
        kernels.pack_entries(found.messages, taken, found.gathered)


def test_states_that_are_none() -> None:
    found = exchange(ranks_of(1, torch.float32))
    out, one, other = torch.zeros(3, LIMIT)
    with pytest.raises(TypeError, match="states is a Tensor, wanted a pair"):
        kernels.add_entries(found.gathered, 1.0, out, one)
    with pytest.raises(ValueError, match="there are 3 states, wanted at most two"):
        kernels.add_entries(found.gathered, 1.0, out, [(one, other)] * 3)
    with pytest.raises(ValueError, match=r"states\[0\] now overlaps out"):
        kernels.add_entries(found.gathered, 1.0, out, [(out, other)])
    with pytest.raises(TypeError, match="ends is None, wanted the end of every parameter"):
        kernels.add_entries(found.gathered, 1.0, out, used=torch.ones(5, dtype=torch.bool))
    with pytest.raises(TypeError, match="used has elements of 4 bytes, wanted bools"):
        kernels.add_entries(found.gathered, 1.0, out, used=torch.ones(5), ends=torch.ones(5).long())
