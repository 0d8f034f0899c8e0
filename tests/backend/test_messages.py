"""Messages between ranks on "pycomm": batches in any order, tags, any source."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist

from tests.backend.worlds import on_world

N = 300_000
"""Elements: more than what two ranks of a host have between them for one message at a time."""


@on_world(2, 3)
def test_batches_in_adverse_order() -> None:
    """Every rank lists its sends first, and each in another order of peers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [(rank + step) % size for step in range(1, size)]
    found = {peer: torch.zeros(N) for peer in peers}
    operations = [dist.P2POp(dist.isend, torch.full((N,), float(rank * 10 + peer)), peer) for peer in peers]
    operations += [dist.P2POp(dist.irecv, found[peer], peer) for peer in reversed(peers)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert {peer: x[-1].item() for peer, x in found.items()} == {peer: peer * 10.0 + rank for peer in peers}


@on_world(2, 3)
def test_all_send_before_any_receives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for peer in range(size):
        if peer != rank:
            dist.send(torch.full((N,), float(rank)), peer)
    for peer in range(size):
        if peer != rank:
            x = torch.zeros(N)
            assert dist.recv(x, peer) == peer
            assert x[0].item() == x[-1].item() == peer


@on_world(2)
def test_tags_are_matched_in_any_order() -> None:
    if dist.get_rank() == 0:
        works = [dist.isend(torch.full((7,), float(tag)), 1, tag=tag) for tag in range(10)]
        for work in works:
            assert work is not None
            work.wait()
        return
    for tag in (9, 3, 0, 1, 2, 8, 7, 6, 5, 4):
        x = torch.zeros(7)
        dist.recv(x, 0, tag=tag)
        assert x[0].item() == tag


@on_world(3)
def test_from_any_source() -> None:
    if dist.get_rank() != 0:
        dist.send(torch.full((4,), float(dist.get_rank())), 0)
        return
    sources = []
    for _ in range(2):
        x = torch.zeros(4)
        sources.append(dist.recv(x))
        assert x[0].item() == sources[-1]
    assert sorted(sources) == [1, 2]


@on_world(3)
def test_ranks_of_a_group_are_named_globally_and_within() -> None:
    group = dist.new_group([2, 0])  # torch sorts them
    rank = dist.get_rank()
    x = torch.zeros(2)
    if rank == 0:
        dist.send(torch.ones(2), 2, group=group)
        assert dist.recv(x, group=group, group_src=1) == 2
    elif rank == 2:
        assert dist.recv(x, 0, group=group) == 0
        dist.send(x + 1, group=group, group_dst=0)


@on_world(2)
def test_messages_and_collectives_side_by_side() -> None:
    rank = dist.get_rank()
    received = [torch.zeros(1000) for _ in range(5)]
    receipts = [dist.irecv(x, 1 - rank, tag=tag) for tag, x in enumerate(received)]
    for tag in range(5):
        y = torch.ones(10)
        dist.all_reduce(y)
        assert y[0].item() == 2.0
        dist.send(torch.full((1000,), float(tag)), 1 - rank, tag=tag)
    for tag, (receipt, x) in enumerate(zip(receipts, received, strict=True)):
        assert receipt is not None
        receipt.wait()
        assert x[-1].item() == tag


@on_world(2)
def test_every_dtype_and_views() -> None:
    rank = dist.get_rank()
    dtypes = (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int64,
        torch.bool,
        torch.cfloat,
    )
    for dtype, start in itertools.product(dtypes, (0, 3)):
        whole = torch.ones(40).to(dtype)
        if rank == 0:
            dist.send(whole[start : start + 16].view(4, 4), 1)
        else:
            x = torch.zeros(4, 4).to(dtype)
            dist.recv(x, 0)
            assert torch.equal(x.view(-1), whole[:16])
