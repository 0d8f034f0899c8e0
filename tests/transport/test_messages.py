"""Messages between two ranks: one suite that every transport passes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pycomm import CommError, Communicator
from pycomm.collectives.transport.base import Transport
from tests.on_ranks import on_ranks

TRANSPORTS = ["shared_memory", "tcp", "torch"]
TIMEOUT = 30.0
each_transport = pytest.mark.parametrize("transport", TRANSPORTS)


@contextmanager
def transport_of(name: str) -> Iterator[Transport]:
    with Communicator(timeout=TIMEOUT, transport=name) as communicator:
        yield communicator.channel.transport
        communicator.barrier()


def content(n: int, *seeds: int) -> torch.Tensor:
    return ((torch.arange(n) * 31 + sum(seed * 7**i for i, seed in enumerate(seeds))) % 1009).float()


@each_transport
@on_ranks(2, 3)
def test_every_size_arrives(transport: str) -> None:
    """Around every border: none, a cell, a piece, more than that, a large one."""
    sizes = [0, 1, 15, 16, 17, 1000, 2031, 2032, 2033, 16_384, 16_385, 70_001, 1_000_003]
    with transport_of(transport) as ranks:
        after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
        for _ in range(2):
            for n in sizes:
                ranks.send(content(n, ranks.rank), after, 3, TIMEOUT)
            for n in sizes:
                x = torch.full((n,), -1.0)
                assert ranks.receive(x, before, 3).wait(TIMEOUT) == before
                assert torch.equal(x, content(n, before))


@each_transport
@on_ranks(2, timeout=120)
def test_a_large_one_each_way(transport: str) -> None:
    with transport_of(transport) as ranks:
        other = 1 - ranks.rank
        x, y = content(25_000_000, ranks.rank), torch.zeros(25_000_000)
        for _ in range(2):
            ranks.send(x, other, 0, TIMEOUT)
            assert ranks.receive(y, other, 0).wait(TIMEOUT) == other
        assert torch.equal(y, content(25_000_000, other))


@each_transport
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
)
@on_ranks(2)
def test_every_dtype(transport: str, dtype: torch.dtype) -> None:
    with transport_of(transport) as ranks:
        other = 1 - ranks.rank
        ranks.send((content(77, ranks.rank) % 2).to(dtype), other, 0, TIMEOUT)
        x = torch.empty(77, dtype=dtype)
        ranks.receive(x, other, 0).wait(TIMEOUT)
        assert torch.equal(x, (content(77, other) % 2).to(dtype))


@each_transport
@on_ranks(2)
def test_numpy_and_strides(transport: str) -> None:
    """What is sent is copied together, what is received must be contiguous."""
    with transport_of(transport) as ranks:
        other = 1 - ranks.rank
        ranks.send(content(12, ranks.rank).view(3, 4).t(), other, 0, TIMEOUT)
        x = np.zeros((4, 3), np.float32)
        ranks.receive(x, other, 0).wait(TIMEOUT)
        assert (x == content(12, other).view(3, 4).t().numpy()).all()
        with pytest.raises(ValueError, match="contiguous"):
            ranks.receive(torch.empty(3, 4).t(), other, 0)


@each_transport
@on_ranks(2)
def test_the_sender_may_write_at_once(transport: str) -> None:
    with transport_of(transport) as ranks:
        if ranks.rank == 0:
            for n in (10, 300_000):
                x = content(n)
                ranks.send(x, 1, 0, TIMEOUT)
                x.zero_()
        else:
            for n in (10, 300_000):
                x = torch.empty(n)
                ranks.receive(x, 0, 0).wait(TIMEOUT)
                assert torch.equal(x, content(n))


@each_transport
@on_ranks(2)
def test_tags_match_in_any_order(transport: str) -> None:
    with transport_of(transport) as ranks:
        tags = [5, 0, 2**30 - 1, 7, 5, 0]
        if ranks.rank == 0:
            for i, tag in enumerate(tags):
                ranks.send(content(9, i, tag), 1, tag, TIMEOUT)
        else:
            for i in (3, 0, 2, 1, 5, 4):  # of each tag in order
                x = torch.empty(9)
                assert ranks.receive(x, 0, tags[i]).wait(TIMEOUT) == 0
                assert torch.equal(x, content(9, i, tags[i])), i


@each_transport
@on_ranks(2)
def test_receipts_match_in_the_order_of_posting(transport: str) -> None:
    with transport_of(transport) as ranks:
        arrays = [torch.empty(5) for _ in range(20)]
        receipts = [ranks.receive(x, 0, i % 2) for i, x in enumerate(arrays)] if ranks.rank == 1 else []
        ranks.barrier(TIMEOUT)
        if ranks.rank == 0:
            for i in range(20):
                ranks.send(content(5, i), 1, i % 2, TIMEOUT)
        for i in reversed(range(len(receipts))):  # waited for in another
            assert receipts[i].wait(TIMEOUT) == 0
            assert receipts[i].is_completed()
            assert receipts[i].wait(TIMEOUT) == 0, "again"
            assert torch.equal(arrays[i], content(5, i))


@each_transport
@on_ranks(3)
def test_any_source(transport: str) -> None:
    with transport_of(transport) as ranks:
        count = 40
        if ranks.rank == 0:
            seen = {1: 0, 2: 0}
            for _ in range(2 * count):
                x = torch.empty(3)
                source = ranks.receive(x, None, 4).wait(TIMEOUT)
                assert torch.equal(x, content(3, source, seen[source])), "messages of one rank overtake each other"
                seen[source] += 1
            assert seen == {1: count, 2: count}
        else:
            for i in range(count):
                ranks.send(content(3, ranks.rank, i), 0, 4, TIMEOUT)


@each_transport
@on_ranks(2, 3)
def test_many_small_ones_before_any_receive(transport: str) -> None:
    count = 20_000 if transport == "shared_memory" else 300
    with transport_of(transport) as ranks:
        others = [p for p in range(ranks.size) if p != ranks.rank]
        x = torch.empty(1)
        for i in range(count):
            for p in others:
                x[0] = i + 100_000 * ranks.rank
                ranks.send(x, p, 0, TIMEOUT)
        for i in range(count):
            for p in others:
                ranks.receive(x, p, 0).wait(TIMEOUT)
                assert x[0] == i + 100_000 * p


@each_transport
@on_ranks(3)
def test_no_order_of_sends_and_receives_blocks(transport: str) -> None:
    """Every rank goes through its sends and receives in an order of its own, large ones among them."""
    with transport_of(transport) as ranks:
        for seed in range(3):
            order = np.random.default_rng([seed, ranks.rank])
            pairs = [(p, tag) for p in range(ranks.size) if p != ranks.rank for tag in range(6)]
            sizes = [1, 100_000, 20, 0, 300_000, 7]
            receipts = []
            for i in order.permutation(2 * len(pairs)).tolist():
                p, tag = pairs[i // 2]
                if i % 2 == 0:
                    ranks.send(content(sizes[tag], ranks.rank, tag), p, tag, TIMEOUT)
                else:
                    x = torch.empty(sizes[tag])
                    receipts.append((ranks.receive(x, p, tag), x, p, tag))
            for i in order.permutation(len(receipts)).tolist():
                receipt, x, p, tag = receipts[i]
                assert receipt.wait(TIMEOUT) == p
                assert torch.equal(x, content(sizes[tag], p, tag))


@each_transport
@on_ranks(2)
def test_another_size_is_the_users_mistake_and_the_next_message_comes(transport: str) -> None:
    with transport_of(transport) as ranks:
        if ranks.rank == 0:
            for n in (10, 100_000, 10):
                ranks.send(content(n), 1, 1, TIMEOUT)
        else:
            for n in (10, 100_000):
                x = torch.full((11,), -1.0, dtype=torch.float64)
                wanted = f"x has 88 bytes (11 elements of 8), but the message from rank 0 with tag 1 has {4 * n} bytes "
                with pytest.raises(ValueError, match=re.escape(f"{wanted}({n} elements of 4)")):
                    ranks.receive(x, 0, 1).wait(TIMEOUT)
                assert (x == -1).all()
            x = torch.empty(10)
            ranks.receive(x, 0, 1).wait(TIMEOUT)
            assert torch.equal(x, content(10))


@each_transport
@on_ranks(2)
def test_mistakes(transport: str) -> None:
    with transport_of(transport) as ranks:
        x, rank = torch.ones(3), ranks.rank
        for name, call in {
            "dst": lambda value: ranks.send(x, value, 0, TIMEOUT),
            "src": lambda value: ranks.receive(x, value, 0),
        }.items():
            for wrong in (2, -1):
                with pytest.raises(ValueError, match=f"{name} is {wrong}, wanted 0 <= {name} < 2"):
                    call(wrong)
            with pytest.raises(ValueError, match=f"{name} is {rank}, this rank itself; wanted another one"):
                call(rank)
            with pytest.raises(TypeError, match=f"{name} is 'x', wanted an int"):
                call("x")
        with pytest.raises(ValueError, match=rf"tag is -1, wanted 0 <= tag < {2**30}"):
            ranks.send(x, 1 - rank, -1, TIMEOUT)
        with pytest.raises(ValueError, match=rf"tag is {2**30}, wanted 0 <= tag < {2**30}"):
            ranks.receive(x, 1 - rank, 2**30)
        with pytest.raises(TypeError, match="x is"):
            ranks.send([1.0], 1 - rank, 0, TIMEOUT)


@each_transport
@on_ranks(2)
def test_messages_and_collectives_do_not_meet(transport: str) -> None:
    """A message may be sent before a collective and received after it; collectives that are messages are not hurt."""
    with transport_of(transport) as ranks:
        other = 1 - ranks.rank
        for i in range(20):
            ranks.send(content(50, ranks.rank, i), other, 0, TIMEOUT)
            out, x = torch.empty(8), torch.full((4,), float(ranks.rank))
            ranks.all_gather(out, x, TIMEOUT)
            assert torch.equal(out.view(2, 4)[other], torch.full((4,), float(other)))
            y = torch.empty(50)
            ranks.receive(y, other, 0).wait(TIMEOUT)
            assert torch.equal(y, content(50, other, i))


@each_transport
@on_ranks(2)
def test_cancel(transport: str) -> None:
    with transport_of(transport) as ranks:
        if ranks.rank == 1:
            x = torch.zeros(4)
            receipt = ranks.receive(x, 0, 0)
            assert not receipt.is_completed()
            assert receipt.cancel()
            assert not receipt.cancel(), "a second time"
            assert receipt.is_completed()
            with pytest.raises(CommError, match="cancelled"):
                receipt.wait(TIMEOUT)
        ranks.barrier(TIMEOUT)
        if ranks.rank == 0:
            ranks.send(content(4), 1, 0, TIMEOUT)
        else:
            y = torch.zeros(4)
            receipt = ranks.receive(y, 0, 0)
            assert receipt.wait(TIMEOUT) == 0
            assert torch.equal(y, content(4))
            assert (x == 0).all()
            assert not receipt.cancel(), "it was received"


@each_transport
@on_ranks(2)
def test_threads(transport: str) -> None:
    """Several threads of a rank send and receive at the same time."""
    with transport_of(transport) as ranks:
        other, errors = 1 - ranks.rank, []

        def talk(tag: int) -> None:
            try:
                for i in range(50):
                    n = 5 + 40_000 * (i % 3 == tag % 3)
                    x = torch.empty(n)
                    receipt = ranks.receive(x, other, tag)
                    ranks.send(content(n, ranks.rank, tag, i), other, tag, TIMEOUT)
                    assert receipt.wait(TIMEOUT) == other
                    assert torch.equal(x, content(n, other, tag, i))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


@each_transport
@on_ranks(2)
def test_through_a_communicator(transport: str) -> None:
    with Communicator(timeout=TIMEOUT, transport=transport) as communicator:
        other = 1 - communicator.rank
        communicator.send(content(6, communicator.rank), other)
        communicator.send(content(7, communicator.rank), other, tag=2)
        x, y = torch.empty(7), torch.empty(6)
        assert communicator.recv(x, tag=2) == other
        assert communicator.recv(y, other) == other
        assert torch.equal(x, content(7, other))
        assert torch.equal(y, content(6, other))
        communicator.barrier()
