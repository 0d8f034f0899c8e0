"""What a rank reduces itself stays where backward left it, and everything else is as if it had been packed."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.collectives.bucket import Bucket
from pycomm.collectives.transport.base import Transport
from tests.on_ranks import on_ranks
from tests.reducer.attaching import grouped

WIDTHS = (300, 1100, 1300, 3)


class Alone:
    """Group of one rank."""

    size = 1

    def empty(self, shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("own", [(0, 0), (0, 64_000), (50_048, 300_032), (300_000, 431_042), (0, 431_042)])
@pytest.mark.parametrize("kind", ["plain", "none", "in place", "other dtype", "strided", "scaled"])
def test_pieces_are_what_would_have_been_packed(own: tuple[int, int], kind: str) -> None:
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((300, 400), (1000,), (100, 30, 100), (10_000,))]
    bucket = Bucket(["a", "b", "c", "d"], params, Alone())
    assert bucket.memory.numel() >= 431_042
    grads: list[torch.Tensor | None] = [torch.randn_like(p) for p in params]
    scale = 1.0
    if kind == "none":
        grads[2] = None
    elif kind == "in place":
        bucket.views[0].copy_(torch.randn(300, 400))
        grads[0] = bucket.views[0]
    elif kind == "other dtype":
        grads[0] = torch.randn(300, 400).to(torch.bfloat16)
    elif kind == "strided":
        grads[0] = torch.randn(400, 300).t()
    elif kind == "scaled":
        scale = 0.5
    wanted = [
        torch.zeros(p.shape) if g is None else g.detach().float() * scale for g, p in zip(grads, params, strict=True)
    ]
    mine = slice(*own)
    if own[1] > 0 and kind != "in place":
        bucket.flat.fill_(math.nan)
    pieces = bucket.gather(grads, scale, own=mine)
    flat = torch.cat([each.reshape(-1) for each in wanted])
    if pieces:
        got = torch.cat(pieces)
        assert got.numel() == mine.stop - mine.start
        inner = flat[mine]
        assert torch.equal(got[: inner.numel()], inner)
        assert torch.equal(got[inner.numel() :], bucket.memory[bucket.num_elements : mine.stop])
        assert any(
            p.data_ptr() < bucket.memory.data_ptr() or p.data_ptr() >= bucket.memory.data_ptr() + bucket.memory.nbytes
            for p in pieces
        )
    outside = torch.ones(bucket.num_elements, dtype=torch.bool)
    if pieces:
        outside[mine] = False
    assert torch.equal(bucket.flat[outside], flat[outside])
    changed = {"none": 2, "in place": 0, "other dtype": 0}.get(kind)
    assert bool(pieces) == (kind != "scaled" and has_large_parts(bucket, mine, changed))


def has_large_parts(bucket: Bucket, own: slice, not_there: int | None) -> bool:
    """Return whether ``own`` has enough of each gradient on average, and nothing of that which is ``not_there``."""
    ends = itertools.accumulate(bucket.numels)
    parts = [min(end, own.stop) - max(end - n, own.start) for n, end in zip(bucket.numels, ends, strict=True)]
    there = {i: part for i, part in enumerate(parts) if part > 0}
    return not_there not in there and sum(there.values()) >= len(there) * (16 << 10) > 0


def training(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, pycomm.Reducer]:
    torch.manual_seed(0)
    layers = [layer for i, o in itertools.pairwise(WIDTHS) for layer in (torch.nn.Linear(i, o), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, pycomm.attach(optimizer, model, **grouped(**options))


def backward(model: torch.nn.Module, step: int) -> None:
    data = torch.randn(8, WIDTHS[0], generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    model(data).square().mean().backward()


def watch(transport: Transport, name: str, spared: list[int]) -> None:
    """Have the number of pieces of each call of ``name`` noted."""
    reduce = getattr(transport, name)

    def noted(*args: Any) -> float:
        spared.append(len(args[3]))
        return float(reduce(*args))

    setattr(transport, name, noted)


@pytest.mark.pairwise
@pytest.mark.parametrize("bucket_mb", [25.0, 2.0])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("shard", [None, "optimizer"])
@on_ranks(2, 3)
def test_training_has_the_bits_of_packing_everything(bucket_mb: float, average: bool, shard: str | None) -> None:
    name = "all_reduce_apart" if shard is None else "reduce_scatter_apart"
    states: list[list[torch.Tensor]] = []
    spared: list[int] = []
    for leaves in (True, False):
        model, optimizer, reducer = training(bucket_mb=bucket_mb, average=average, shard=shard)
        lanes = reducer._engine.lanes
        if not leaves:
            for lane in lanes:
                lane.channel.transport.own_share = lane.channel.transport.reduce_scatter_apart = None
        else:
            watch(lanes[0].channel.transport, name, spared)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        states.append([p.detach().clone() for p in model.parameters()])
        reducer.detach()
    assert max(spared) > 0, "something stayed where it was"
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("place", [0.1, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("shard", [None, "optimizer"])
@on_ranks(2)
def test_the_rank_of_a_nan_is_named_wherever_it_lies(place: float, shard: str | None) -> None:
    model, optimizer, reducer = training(check_replicas=0, shard=shard)
    weight = model[2].weight  # type: ignore[index]
    if dist.get_rank() == 1:
        weight.register_hook(lambda grad: spoiled(grad, int(place * grad.numel())))
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        assert not bool(torch.isfinite(weight.grad).all())
        told = reducer.stats()["last_nonfinite"]
        assert dist.get_rank() == 0 or told == "parameter '2.weight' on rank 1"
        reducer.skip_step()
    reducer.detach()


def spoiled(grad: torch.Tensor, place: int) -> torch.Tensor:
    out = grad.clone()
    out.view(-1)[place] = math.nan
    return out
