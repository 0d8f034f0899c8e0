"""Random sequences of operations on "pycomm" and on Gloo, which must leave the same bits.

Each rank draws the same sequence. Numbers are small and whole, so that sums are exact in whatever order they are made.
PYCOMM_FUZZ_SECONDS says for how long (`nox -s fuzz`: ten minutes).
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.backend.groups import pycomm_group
from tests.on_ranks import on_ranks

SECONDS = float(os.environ.get("PYCOMM_FUZZ_SECONDS", "6"))
SEED = int(os.environ.get("PYCOMM_FUZZ_SEED", "0"))
pytestmark = pytest.mark.timeout(math.ceil(SECONDS) + 90)
FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
WHOLES = torch.int8, torch.uint8, torch.int32, torch.int64
COUNTS = 1, 2, 3, 7, 64, 1000, 4099, 70_000
OPS = dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT

Tensors = list[torch.Tensor]
Group = dist.ProcessGroup


class Draw:
    """What is drawn alike on all ranks, and this rank's numbers.

    Args:
        rng: the same on all ranks.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.rank, self.size = rng, dist.get_rank(), dist.get_world_size()
        self.dtype = rng.choice(FLOATS + WHOLES)
        self._numbers = torch.Generator().manual_seed(rng.randrange(1 << 30) * 64 + self.rank)

    def tensor(self, count: int | None = None) -> torch.Tensor:
        """Return a tensor of numbers from 0 to 3, of one to three dimensions, sometimes a part of a larger one."""
        count = self.rng.choice(COUNTS) if count is None else count
        is_part, is_deep = self.rng.random() < 0.3, self.rng.random() < 0.3
        x = torch.randint(0, 4, (count + 3 * is_part,), generator=self._numbers).to(self.dtype)
        x = x[3 * is_part :]
        return x.view(1, -1, 1) if is_deep else x

    def root(self) -> int:
        return self.rng.randrange(self.size)

    def op(self) -> Any:
        return self.rng.choice(OPS)


def all_reduce(draw: Draw) -> Iterator[Any]:
    x, op, is_async = draw.tensor(), draw.op(), draw.rng.random() < 0.3

    def call(group: Group, x: torch.Tensor) -> Tensors:
        work = dist.all_reduce(x, op, group, async_op=is_async)
        if work is not None:
            work.wait()
        return [x]

    yield call, [x]


def broadcast(draw: Draw) -> Iterator[Any]:
    root = draw.root()

    def call(group: Group, x: torch.Tensor) -> Tensors:
        dist.broadcast(x, group=group, group_src=root)
        return [x]

    yield call, [draw.tensor()]


def reduce(draw: Draw) -> Iterator[Any]:
    root, op = draw.root(), draw.op()

    def call(group: Group, x: torch.Tensor) -> Tensors:
        dist.reduce(x, op=op, group=group, group_dst=root)
        return [x] if draw.rank == root else []  # what the others hold then is not defined

    yield call, [draw.tensor()]


def all_gather(draw: Draw) -> Iterator[Any]:
    def call(group: Group, x: torch.Tensor) -> Tensors:
        outs = [torch.zeros_like(x) for _ in range(draw.size)]
        dist.all_gather(outs, x, group)
        return outs

    yield call, [draw.tensor()]


def all_gather_into_tensor(draw: Draw) -> Iterator[Any]:
    def call(group: Group, x: torch.Tensor) -> Tensors:
        out = torch.zeros(x.numel() * draw.size, dtype=x.dtype)
        dist.all_gather_into_tensor(out, x.reshape(-1), group)
        return [out]

    yield call, [draw.tensor()]


def gather(draw: Draw) -> Iterator[Any]:
    root = draw.root()

    def call(group: Group, x: torch.Tensor) -> Tensors:
        outs = [torch.zeros_like(x) for _ in range(draw.size)] if draw.rank == root else None
        dist.gather(x, outs, group=group, group_dst=root)
        return outs or []

    yield call, [draw.tensor()]


def scatter(draw: Draw) -> Iterator[Any]:
    root, count = draw.root(), draw.rng.choice(COUNTS)

    def call(group: Group, *xs: torch.Tensor) -> Tensors:
        out = torch.zeros_like(xs[0])
        dist.scatter(out, list(xs) if draw.rank == root else None, group=group, group_src=root)
        return [out]

    first = draw.tensor(count)
    yield call, [first, *(draw.tensor(count).view(first.shape) for _ in range(draw.size - 1))]


def reduce_scatter(draw: Draw) -> Iterator[Any]:
    count, op = draw.rng.choice(COUNTS), draw.op()

    def call(group: Group, x: torch.Tensor) -> Tensors:
        out = torch.zeros(count, dtype=x.dtype)
        dist.reduce_scatter_tensor(out, x.reshape(-1), op, group)
        return [out]

    yield call, [draw.tensor(count * draw.size)]


def all_to_all_single(draw: Draw) -> Iterator[Any]:
    table = [[draw.rng.choice((0, 1, 5, 300)) for _ in range(draw.size)] for _ in range(draw.size)]
    mine, theirs = table[draw.rank], [row[draw.rank] for row in table]

    def call(group: Group, x: torch.Tensor) -> Tensors:
        out = torch.zeros(sum(theirs), dtype=x.dtype)
        dist.all_to_all_single(out, x.reshape(-1), theirs, mine, group)
        return [out]

    yield call, [draw.tensor(sum(mine))]


def ring(draw: Draw) -> Iterator[Any]:
    """Send to the next rank, receive from the one before; several messages of other tags, posted in another order."""
    tags = draw.rng.sample(range(1000), 3)
    order = draw.rng.sample(tags, 3)

    def call(group: Group, *xs: torch.Tensor) -> Tensors:
        after, before = (draw.rank + 1) % draw.size, (draw.rank - 1) % draw.size
        outs = {tag: torch.zeros_like(xs[0]) for tag in tags}
        works = [dist.irecv(outs[tag], group=group, tag=tag, group_src=before) for tag in order]
        works += [dist.isend(x, group=group, tag=tag, group_dst=after) for x, tag in zip(xs, tags, strict=True)]
        for work in works:
            assert work is not None
            work.wait()
        return [outs[tag] for tag in tags]

    count = draw.rng.choice(COUNTS)
    first = draw.tensor(count)
    yield call, [first, *(draw.tensor(count).view(first.shape) for _ in range(2))]


def barrier(draw: Draw) -> Iterator[Any]:
    def call(group: Group) -> Tensors:
        dist.barrier(group)
        return []

    yield call, []


def objects(draw: Draw) -> Iterator[Any]:
    root = draw.root()

    def call(group: Group) -> Tensors:
        told: list[Any] = [None] * draw.size
        dist.all_gather_object(told, {"rank": draw.rank}, group)
        assert told == [{"rank": rank} for rank in range(draw.size)]
        said = [("from", root) if draw.rank == root else None]
        dist.broadcast_object_list(said, group=group, group_src=root)
        assert said == [("from", root)]
        return []

    yield call, []


OPERATIONS: tuple[Callable[[Draw], Iterator[Any]], ...] = (
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    reduce_scatter,
    all_to_all_single,
    ring,
    barrier,
    objects,
)


def compare(ours: Group, gloos: Group, rng: random.Random, what: str) -> None:
    """Run one operation on both groups; AssertionError unless the bits are the same."""
    operation = rng.choice(OPERATIONS)
    draw = Draw(rng)
    ((call, inputs),) = operation(draw)
    try:
        wanted = call(gloos, *(x.clone() for x in inputs))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if any(text in str(error) for text in ("not support", "nsupported", "Invalid scalar type")):
            return  # Gloo has no such operation
        raise
    found = call(ours, *(x.clone() for x in inputs))
    for one, other in zip(found, wanted, strict=True):
        same = torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        assert same, f"{what}: {operation.__name__} of {draw.dtype}: {one.flatten()[:8]} is not {other.flatten()[:8]}"


def go_on(begun: float, seconds: float) -> bool:
    """Return whether rank 0 still has time. Collective."""
    flag = torch.tensor([time.monotonic() - begun < seconds])
    dist.broadcast(flag, 0)
    return bool(flag)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@on_ranks(2, 3, timeout=math.ceil(SECONDS) + 60.0)
def test_whatever_is_done_gloo_would_have_left_the_same(transport: str) -> None:
    begun, number = time.monotonic(), 0
    with pytest.MonkeyPatch.context() as patch:
        if transport == "tcp":  # ranks of other hosts
            from pycomm.collectives.transport import rendezvous

            real = rendezvous.host_identity()
            patch.setattr(rendezvous, "host_identity", lambda: f"{dist.get_rank()}{real}")
        with pycomm_group() as ours:
            gloos = dist.group.WORLD
            assert gloos is not None
            while go_on(begun, SECONDS / 4):
                for _ in range(20):
                    rng = random.Random(f"{SEED}/{number}")
                    compare(ours, gloos, rng, f"seed {SEED}, operation {number}")
                    number += 1
    assert number >= 20
