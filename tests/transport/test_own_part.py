"""Reductions to which a rank's own part need not be copied: results have the same bits, wherever it lies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from pycomm import Communicator
from tests.on_ranks import on_ranks

N = 700_001


def contribution(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)).to(dtype)


def expected(c: Communicator, dtype: torch.dtype, op: str) -> torch.Tensor:
    x = c.empty(N, dtype)
    x.copy_(contribution(c.rank, dtype))
    c.all_reduce(x, op)
    return x


def apart(x: torch.Tensor, mine: torch.Tensor, own: slice) -> list[torch.Tensor]:
    """Fill ``x`` but for two thirds of the elements ``own``; return those: elsewhere, in place, and elsewhere."""
    x.copy_(mine)
    first, second = own.start + (own.stop - own.start) // 3, own.start + (own.stop - own.start) // 2
    pieces = [mine[own.start : first].clone(), x[first:second], mine[second : own.stop].clone()]
    x[own.start : first] = math.nan
    x[second : own.stop] = math.nan
    return pieces


def largest_of(pieces: Sequence[torch.Tensor]) -> float:
    return max((float(piece.abs().max()) for piece in pieces if piece.numel() > 0), default=0.0)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@on_ranks(2, 3)
def test_results_have_the_same_bits(dtype: torch.dtype, op: str) -> None:
    with Communicator() as c:
        x = c.empty(N, dtype)
        own = c.channel.own_share(x)
        assert own is not None
        assert own.stop - own.start == pytest.approx(N / c.size, abs=64 * c.size), "equal, as nobody has been late yet"
        wanted = expected(c, dtype, op)
        mine = contribution(c.rank, dtype)
        for leaves_out in (set(), {0}, {0, 1}):  # ranks that have copied everything
            own = c.channel.own_share(x)
            assert own is not None
            pieces = apart(x, mine, own) if c.rank not in leaves_out else []
            if not pieces:
                x.copy_(mine)
            told = torch.tensor([largest_of([pieces[0], pieces[2]]) if pieces else 0.0])
            largest = c.channel.all_reduce_apart(x, op, own.start, pieces)
            assert torch.equal(x, wanted)
            c.all_reduce(told, "max")
            assert largest == float(told)


@on_ranks(2, 3)
def test_what_is_not_finite_is_told_to_all() -> None:
    for value in (math.nan, math.inf, -math.inf):
        with Communicator() as c:
            x, mine = c.empty(N), contribution(c.rank, torch.float32)
            own = c.channel.own_share(x)
            assert own is not None
            pieces = apart(x, mine, own)
            if c.rank == c.size - 1:
                pieces[2][pieces[2].numel() // 2] = value
            largest = c.channel.all_reduce_apart(x, "sum", own.start, pieces)
            assert math.isnan(largest) if math.isnan(value) else largest == math.inf
            assert int((~torch.isfinite(x)).sum()) == 1
            assert c.channel.all_reduce_apart(x.fill_(1.0), "sum", own.start, []) == 0.0, (
                "the next one knows nothing of it"
            )


@on_ranks(2, 3)
def test_an_array_that_lies_elsewhere_on_one_rank() -> None:
    """Then arrays travel in segments, of which ranks reduce other parts than was expected."""
    with Communicator() as c:
        wanted = expected(c, torch.float32, "sum")
        in_arena, mine = c.empty(N), contribution(c.rank, torch.float32)
        own = c.channel.own_share(in_arena)
        assert own is not None
        if c.rank == 0:
            x, pieces = mine.clone(), []
        else:
            x, pieces = in_arena, apart(in_arena, mine, own)
        largest = c.channel.all_reduce_apart(x, "sum", own.start, pieces)
        assert torch.equal(x, wanted)
        assert largest > 0.0
        # The same of a rank whose own array it is.
        x = mine.clone() if c.rank == 0 else in_arena
        pieces = apart(x, mine, own)
        assert c.channel.all_reduce_apart(x, "sum", own.start, pieces) > 0.0
        assert torch.equal(x, wanted)


@on_ranks(2)
def test_another_part_than_the_share_is_put_in_place() -> None:
    with Communicator() as c:
        wanted, x, mine = expected(c, torch.float32, "sum"), c.empty(N), contribution(c.rank, torch.float32)
        for part in (slice(0, 1000), slice(N - 500_000, N), slice(64, 64)):
            pieces = apart(x, mine, part)
            c.channel.all_reduce_apart(x, "sum", part.start, pieces)
            assert torch.equal(x, wanted)


@on_ranks(2, 3)
def test_small_arrays_and_other_types_are_to_be_copied_whole() -> None:
    with Communicator() as c:
        for x in (c.empty(1000), c.empty(N, torch.float64), c.empty(N, torch.int64), torch.empty(N)):
            own = c.channel.own_share(x)
            assert own is not None
            assert own.start == own.stop
        small, mine = c.empty(1000), contribution(c.rank, torch.float32)[:1000]
        assert c.channel.all_reduce_apart(small, "sum", 100, apart(small, mine, slice(100, 700))) > 0.0
        assert torch.equal(
            small, sum((contribution(p, torch.float32)[:1000] for p in range(c.size)), torch.zeros(1000))
        )


def parts_of(c: Communicator, x: torch.Tensor) -> list[torch.Tensor]:
    """Cut ``x`` into one part for each rank, of different lengths."""
    borders = [0, *(N // c.size * p + 1000 * p for p in range(1, c.size)), N]
    return [x[begin:end] for begin, end in itertools.pairwise(borders)]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("in_arena", [True, False])
@on_ranks(2, 3)
def test_parts_of_a_reduce_scatter_have_the_same_bits(dtype: torch.dtype, op: str, in_arena: bool) -> None:
    with Communicator() as c:
        wanted = parts_of(c, expected(c, dtype, op))[c.rank]
        mine = contribution(c.rank, dtype)
        for copied in (set(), {0}, {0, 1}):  # ranks that have copied everything
            x = c.empty(N, dtype) if in_arena else torch.empty(N, dtype=dtype)
            parts = parts_of(c, x)
            if c.rank in copied:
                x.copy_(mine)
                c.channel.reduce_scatter_v(parts[c.rank], parts, op)
            else:
                begin = parts[c.rank].storage_offset() - x.storage_offset()
                pieces = apart(x, mine, slice(begin, begin + len(parts[c.rank])))
                told = largest_of([pieces[0], pieces[2]])
                assert c.channel.reduce_scatter_apart(parts[c.rank], parts, op, pieces) == told
            assert torch.equal(parts[c.rank], wanted)


@on_ranks(2)
def test_a_part_that_is_not_finite_is_told_to_its_own_rank() -> None:
    with Communicator() as c:
        x = c.empty(N).fill_(1.0)
        parts = parts_of(c, x)
        for value in (math.nan, math.inf, -math.inf):
            pieces = [torch.ones(len(parts[c.rank]))]
            if c.rank == 1:
                pieces[0][1234] = value
            largest = c.channel.reduce_scatter_apart(parts[c.rank], parts, "sum", pieces)
            found = math.isnan(largest) if math.isnan(value) else largest == math.inf
            assert found if c.rank == 1 else largest == 1.0


@on_ranks(2)
def test_mistakes_in_a_part_are_errors_on_every_rank() -> None:
    with Communicator() as c:
        x = c.empty(N).fill_(1.0)
        parts = parts_of(c, x)
        own = len(parts[c.rank])
        wrong = [
            ([torch.ones(own - 1)], "pieces do not fill out"),
            ([torch.ones(own + 1)], "ends beyond x"),
            ([torch.ones(own, dtype=torch.float64)], "has dtype float64"),
            (3, "pieces"),
        ]
        for pieces, says in wrong:
            given = pieces if c.rank == 1 else [torch.ones(own)]
            with pytest.raises((ValueError, TypeError), match=says if c.rank == 1 else "rank 1 could not take part"):
                c.channel.reduce_scatter_apart(parts[c.rank], parts, "sum", given)  # type: ignore[arg-type]
        c.all_reduce(x)
        assert bool((x == c.size).all())


@on_ranks(2)
def test_mistakes_are_errors_on_every_rank_and_nothing_is_broken() -> None:
    with Communicator() as c:
        x = c.empty(N).fill_(1.0)
        wrong = [
            (-1, [torch.ones(5)], "begin lies outside of x"),
            (N + 1, [torch.ones(5)], "begin lies outside of x"),
            (N - 4, [torch.ones(5)], "ends beyond x"),
            (0, [torch.ones(5, dtype=torch.float64)], "has dtype float64"),
            (0, [x[1:6]], "overlaps x elsewhere"),
            (0, 3, "pieces"),
        ]
        for begin, pieces, says in wrong:
            is_mine = c.rank == 1
            with pytest.raises((ValueError, TypeError), match=says if is_mine else "rank 1 could not take part"):
                c.channel.all_reduce_apart(x, "sum", begin if is_mine else 0, pieces if is_mine else [])  # type: ignore[arg-type]
        c.all_reduce(x)
        assert bool((x == c.size).all())


@on_ranks(3)
def test_shares_change_with_who_is_late_and_results_do_not() -> None:
    """What a rank reduces is known before an operation, although it depends on how long the ranks have waited."""
    with Communicator() as c:
        wanted, x, mine = expected(c, torch.float32, "mean"), c.empty(N), contribution(c.rank, torch.float32)
        for turn in range(30):
            own = c.channel.own_share(x)
            assert own is not None
            pieces = apart(x, mine, own) if own.stop > own.start else []
            if not pieces:
                x.copy_(mine)
            if turn % 3 == c.rank:
                torch.randn(300_000).sort()  # some are late
            c.channel.all_reduce_apart(x, "mean", own.start, pieces)
            assert torch.equal(x, wanted)
