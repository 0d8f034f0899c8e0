"""Collectives whose arrays differ from rank to rank: all_to_all_v, reduce_scatter_v; and reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from pycomm import Communicator
from pycomm.collectives.transport.rendezvous import order_of
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks
from tests.ranks import PerRank, RankPool
from tests.transport.test_hierarchical import FRAMES, sent_to_others

TRANSPORTS = ["shared_memory", "tcp", "torch"]
HOSTS = {"shared_memory": "aaaa", "torch": "abcd", "even hosts": "abab", "uneven hosts": "abbb"}
TIMEOUT = 30.0


def number(from_rank: int, to_rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What one rank has for another: small integers, different for every pair and place."""
    return ((torch.arange(n) * (from_rank + 2) + 5 * to_rank + from_rank) % 7).to(dtype)


def place(communicator: Communicator, x: torch.Tensor, memory: str) -> torch.Tensor:
    return communicator.empty(x.shape, x.dtype).copy_(x) if memory == "empty" else x.clone()


def lengths(size: int, kind: str) -> list[list[int]]:
    """lengths[p][q]: elements from rank p to rank q."""
    of_kind: dict[str, Callable[[int, int], int]] = {
        "none": lambda p, q: 0,
        "small": lambda p, q: (3 * p + q) % 5,
        "mailbox": lambda p, q: 4000 + 7 * p + q,
        "large": lambda p, q: 150_000 * ((p + 2 * q) % 3) + 11 * q,
        "one large": lambda p, q: 1_000_003 if (p, q) == (0, size - 1) else 1,
        "to one": lambda p, q: 0 if q > 0 else 300_000 + p,
        "from one": lambda p, q: 0 if p > 0 else 300_000 + q,
    }
    return [[of_kind[kind](p, q) for q in range(size)] for p in range(size)]


KINDS = ("none", "small", "mailbox", "large", "one large", "to one", "from one")


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(1, 2, 3, 4)
def test_all_to_all_v(transport: str) -> None:
    with Communicator(timeout=TIMEOUT, transport=transport) as communicator:
        rank, size = communicator.rank, communicator.size
        for i, kind in enumerate(2 * KINDS):
            counts = lengths(size, kind)
            # Each rank decides for itself where its arrays lie, and for each of them.
            memory = ["empty" if (p + rank + i) % 3 == 0 else "tensor" for p in range(size)]
            xs = [place(communicator, number(rank, p, counts[rank][p]), memory[p]) for p in range(size)]
            kept = [x.clone() for x in xs]
            outs: list[Any] = [
                place(communicator, torch.full((counts[p][rank],), -1.0), memory[p]) if counts[p][rank] else None
                for p in range(size)
            ]
            communicator.channel.transport.all_to_all_v(outs, xs, TIMEOUT)
            for x in xs:
                x.fill_(9.0)  # what was sent is the caller's again
            for p in range(size):
                if counts[p][rank]:
                    assert torch.equal(outs[p], number(p, rank, counts[p][rank])), (kind, p)
                assert torch.equal(kept[p], number(rank, p, counts[rank][p]))


@pytest.mark.pairwise
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("memory", ["tensor", "empty"])
@on_ranks(2, 3, 4)
def test_collectives_made_of_it(transport: str, memory: str) -> None:
    """all_gather of uneven arrays, in place; gather, scatter and broadcast: the same array for several ranks."""
    with Communicator(timeout=TIMEOUT, transport=transport) as communicator:
        rank, size = communicator.rank, communicator.size
        exchange = communicator.channel.transport.all_to_all_v
        for n in (1, 900, 40_000, 1_500_000):
            root = n % size
            gathered = [place(communicator, torch.zeros(n + p), memory) for p in range(size)]
            gathered[rank].copy_(number(rank, 0, n + rank))
            exchange(gathered, [gathered[rank]] * size, TIMEOUT)
            assert all(torch.equal(gathered[p], number(p, 0, n + p)) for p in range(size))

            x = place(communicator, number(rank, 1, n), memory)
            outs = [torch.empty(n) if rank == root else None for _ in range(size)]
            exchange(outs, [x if p == root else None for p in range(size)], TIMEOUT)
            assert rank != root or all(
                torch.equal(out, number(p, 1, n)) for p, out in enumerate(outs) if out is not None
            )

            out = place(communicator, torch.zeros(n), memory)
            parts = [number(root, p, n) if rank == root else None for p in range(size)]
            exchange([out if p == root else None for p in range(size)], parts, TIMEOUT)
            assert torch.equal(out, number(root, rank, n))

            sent = [x if rank == root and p != root else None for p in range(size)]
            exchange([x if p == root and rank != root else None for p in range(size)], sent, TIMEOUT)
            assert torch.equal(x, number(root, 1, n))


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_any_dtype_and_holder(transport: str) -> None:
    """Bytes are what must match: of types that only move, of numpy, and of strided arrays that are read."""
    with Communicator(timeout=TIMEOUT, transport=transport) as communicator:
        rank, other = communicator.rank, 1 - communicator.rank
        exchange = communicator.channel.transport.all_to_all_v
        complex_out, numpy_out = torch.zeros(3, dtype=torch.complex64), np.zeros(5, np.uint16)
        sent = [None, torch.arange(6.0)[::2] * (1 + 1j)] if rank == 0 else [np.arange(5, dtype=np.uint16), None]
        exchange((None, numpy_out) if rank == 0 else (complex_out, None), sent, TIMEOUT)
        if rank == 0:
            assert numpy_out.tolist() == [0, 1, 2, 3, 4]
        else:
            assert complex_out.tolist() == [0j, 2 + 2j, 4 + 4j]
        flags = torch.tensor([rank == 1])
        exchange(
            [torch.empty(0), flags] if rank == 0 else [flags, None],
            [flags.clone() if p == other else None for p in (0, 1)],
            TIMEOUT,
        )
        assert flags.item() is (rank == 0)


@contextmanager
def communicator_on(hosts: str) -> Iterator[Communicator]:
    with on_hosts(HOSTS[hosts]), Communicator(timeout=TIMEOUT) as communicator:
        yield communicator


def in_one_piece(communicator: Communicator, parts: list[torch.Tensor], order: list[int]) -> list[torch.Tensor]:
    """Return copies of ``parts`` in memory of the communicator, where they lie one after the other in ``order``."""
    flat = communicator.empty(sum(map(len, parts)), parts[0].dtype)
    by_place = torch.split(flat, [len(parts[p]) for p in order])
    return [by_place[order.index(p)].copy_(part) for p, part in enumerate(parts)]


@pytest.mark.pairwise
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("ordered", [True, False])
@on_ranks(1, 2, 3, 4)
def test_all_gather_v(hosts: str, ordered: bool) -> None:
    with communicator_on(hosts) as communicator:
        rank, size = communicator.rank, communicator.size
        order = order_of(communicator.channel.transport.hosts) if ordered else list(range(size))
        for n in (0, 1, 900, 40_000, 500_001):
            counts = [(n * (p + 1)) // size for p in range(size)]
            outs = in_one_piece(communicator, [torch.full((count,), -1.0) for count in counts], order)
            outs[rank].copy_(number(rank, 0, counts[rank]))
            communicator.channel.all_gather_v(outs, outs[rank])
            assert all(torch.equal(outs[p], number(p, 0, counts[p])) for p in range(size))
            into = [torch.full((count,), -1.0) for count in counts]
            communicator.channel.all_gather_v(into, outs[rank])
            assert all(torch.equal(into[p], number(p, 0, counts[p])) for p in range(size))
        mixed = [torch.empty(3 + p, dtype=torch.float16 if p else torch.int32) for p in range(size)]
        mixed[rank].fill_(rank + 7)
        communicator.channel.all_gather_v(mixed, mixed[rank].clone())
        assert all(bool((x == p + 7).all()) for p, x in enumerate(mixed))


@on_ranks(4)
def test_gathering_among_hosts_sends_each_part_once_to_each() -> None:
    with communicator_on("even hosts") as communicator:
        outs = [communicator.empty(10_000) for _ in range(4)]
        for operation in (
            lambda: communicator.channel.all_gather_v(outs, outs[communicator.rank]),
            lambda: communicator.channel.reduce_scatter_v(torch.empty(10_000), outs, "sum"),
        ):
            # To the other host: this rank's part, or its host's sum of one rank's there.
            assert 0 <= sent_to_others(communicator, "abab", operation) - 40_000 <= FRAMES


@pytest.mark.pairwise
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@on_ranks(1, 2, 3, 4)
def test_reduce_scatter_v(hosts: str, dtype: torch.dtype) -> None:
    with communicator_on(hosts) as communicator:
        rank, size = communicator.rank, communicator.size
        for i, n in enumerate((0, 1, 3000, 90_000, 700_001)):
            counts = [(n * (p + 1)) // size for p in range(size)]
            memory = ["empty" if (p + rank + i) % 2 == 0 else "tensor" for p in range(size)]
            for op in ("sum", "max", *(["mean"] if dtype.is_floating_point and size != 3 else [])):
                xs: list[Any] = [place(communicator, number(rank, p, counts[p], dtype), memory[p]) for p in range(size)]
                if i % 2:
                    xs = in_one_piece(communicator, xs, order_of(communicator.channel.transport.hosts))
                in_place = op == "max"
                out = xs[rank] if in_place else torch.empty(counts[rank], dtype=dtype)
                communicator.channel.transport.reduce_scatter_v(out, xs, op, TIMEOUT)
                parts = torch.stack([number(p, rank, counts[rank], dtype) for p in range(size)])
                wanted = parts.amax(0) if op == "max" and counts[rank] else parts.double().sum(0)
                wanted = wanted / size if op == "mean" else wanted
                assert torch.equal(out, wanted.to(dtype)), (n, op)
                for p in range(size):
                    assert (p == rank and in_place) or torch.equal(xs[p], number(rank, p, counts[p], dtype))


@pytest.mark.pairwise
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("memory", ["tensor", "empty"])
@on_ranks(1, 2, 3, 4)
def test_reduce(transport: str, memory: str) -> None:
    with Communicator(timeout=TIMEOUT, transport=transport) as communicator:
        rank, size = communicator.rank, communicator.size
        for n in (0, 1, size + 1, 4099, 16_385, 300_007, 1_000_003):
            for dtype, op in ((torch.float32, "sum"), (torch.float16, "mean"), (torch.int32, "min")):
                dst = (n + len(op)) % size
                mine = number(rank, 0, n, dtype)
                x = place(communicator, mine, memory)
                communicator.reduce(x, dst, op)
                parts = torch.stack([number(p, 0, n, dtype) for p in range(size)])
                if rank != dst:
                    assert torch.equal(x, mine), "another rank's array was changed"
                elif op == "mean":
                    torch.testing.assert_close(x.double(), parts.double().mean(0), rtol=1e-3, atol=0)
                else:
                    assert torch.equal(x, (parts.amin(0) if n and op == "min" else parts.sum(0)).to(dtype)), (n, op)
        work = communicator.reduce(torch.ones(4), 0, async_op=True)
        assert work is not None
        work.wait()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(3)
def test_lengths_that_do_not_match_name_the_pair(transport: str) -> None:
    """On every rank, also on those that are not part of it; and nothing is written."""
    with Communicator(timeout=TIMEOUT, transport=transport) as communicator:
        rank, size = communicator.rank, communicator.size
        for n in (4, 300_000):
            outs, xs = [torch.zeros(n) for _ in range(size)], [torch.ones(n) for _ in range(size)]
            if rank == 2:
                xs[1] = torch.ones(n + 1)
            says = f"all_to_all_v: rank 2 has {4 * n + 4} bytes for rank 1, which expects {4 * n}$"
            with pytest.raises(ValueError, match=says):
                communicator.channel.transport.all_to_all_v(outs, xs, TIMEOUT)
            assert not torch.stack(outs).any()
            out = torch.zeros(n)
            if rank == 2:
                xs[1] = torch.ones(n - 1)
            says = f"reduce_scatter_v: rank 2 has {4 * n - 4} bytes for rank 1, which expects {4 * n}$"
            with pytest.raises(ValueError, match=says):
                communicator.channel.transport.reduce_scatter_v(out, xs, "sum", TIMEOUT)
            assert not out.any()
            communicator.barrier()


def wrong_part(transport: str, wrong: str) -> str:
    with Communicator(timeout=20, transport=transport) as communicator:
        calls = communicator.channel.transport
        x = torch.ones(4)
        bad: dict[str, Callable[[], Any]] = {
            "no sequence": lambda: calls.all_to_all_v(x, [x, x], TIMEOUT),  # type: ignore[arg-type]
            "text": lambda: calls.all_to_all_v([None, None], "ab", TIMEOUT),
            "too few": lambda: calls.all_to_all_v([x], [x, x], TIMEOUT),
            "item": lambda: calls.all_to_all_v([None, None], [x, 3], TIMEOUT),
            "read-only": lambda: calls.all_to_all_v([None, b"abcd"], [None, None], TIMEOUT),
            "twice": lambda: calls.all_to_all_v([x[:2], x[1:]], [None, None], TIMEOUT),
            "overlap": lambda: calls.all_to_all_v([x, None], [x, None], TIMEOUT),
            "dst": lambda: communicator.reduce(x, 2),
            "dst of letters": lambda: communicator.reduce(x, "a"),  # type: ignore[arg-type]
            "reduced bool": lambda: communicator.reduce(torch.ones(2, dtype=torch.bool), 0),
            "part dtype": lambda: calls.reduce_scatter_v(x, [x.int(), x], "sum", TIMEOUT),
            "part length": lambda: calls.reduce_scatter_v(x, [torch.ones(4), torch.ones(3)], "sum", TIMEOUT),
            "part overlap": lambda: calls.reduce_scatter_v(x, [x, x], "sum", TIMEOUT),
            "part op": lambda: calls.reduce_scatter_v(x, [x, x], "average", TIMEOUT),
            "another operation": lambda: calls.all_to_all_v([None, None], [None, None], TIMEOUT),
            "another dst": lambda: communicator.reduce(x, 0),
        }
        with pytest.raises((TypeError, ValueError)) as caught:
            bad[wrong]() if communicator.rank == 1 else communicator.reduce(torch.ones(4), 1)
        communicator.all_reduce(x)
        assert torch.equal(x, torch.full((4,), 2.0))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("no sequence", "TypeError: outs is a Tensor, wanted a sequence of arrays"),
        ("text", "TypeError: xs is a str, wanted a sequence of arrays"),
        ("too few", "ValueError: outs has 1 arrays, wanted 2, one for each rank"),
        ("item", "TypeError: xs[1] is a int, wanted a torch tensor"),
        ("read-only", "ValueError: outs[1] is read-only"),
        ("twice", "ValueError: outs[1] overlaps outs[0]"),
        ("overlap", "ValueError: outs[0] overlaps xs[0], wanted arrays apart"),
        ("dst", "ValueError: dst is 2, wanted 0 <= dst < 2"),
        ("dst of letters", "TypeError: dst is 'a', wanted"),
        ("reduced bool", "TypeError: x has dtype torch.bool, wanted one of"),
        ("part dtype", "TypeError: xs[0] has int32, wanted dtype float32 as out"),
        ("part length", "ValueError: out has 4 elements, wanted 3, as xs[1] has"),
        ("part overlap", "ValueError: out overlaps xs[0], wanted arrays apart"),
        ("part op", "ValueError: op is 'average', wanted"),
        ("another operation", "the ranks disagree: rank 1 called all_to_all_v() where rank 0 called reduce("),
        ("another dst", 'rank 1 called reduce(4 elements of float32, dst=0, op="sum") where rank 0 called'),
    ],
)
def test_a_mistake_on_one_rank_is_an_error_on_all(two_ranks: RankPool, transport: str, wrong: str, says: str) -> None:
    innocent, guilty = two_ranks.run(wrong_part, PerRank([transport] * 2), wrong)
    assert says in guilty
    assert innocent.startswith(("ValueError: reduce: rank 1 could not take part", "ValueError: the ranks disagree"))
