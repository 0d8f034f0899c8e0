"""Buckets that backward packs itself, as the communication thread is behind: the same bits, and gradients are freed."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.reducer import engine
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached, own_state

METHODS = {
    "dense": None,
    "fp16": pycomm.FP16(),
    "bf16": pycomm.BF16(),
    "topk": pycomm.TopK(0.2),
    "dgc": pycomm.DGC(0.2),
    "int4": pycomm.Int4(),
    "onebit": pycomm.OneBit(),
    "chunktopk": pycomm.ChunkTopK(8, 64),
    "powersgd": pycomm.PowerSGD(1),
    "randomk": pycomm.RandomK(0.2),
}


def train(method: Any, most_waiting: int) -> tuple[list[torch.Tensor], list[int], str | None]:
    """Return gradients and state of some steps, the number of buckets that backward packed, and who broke the last."""
    rank, found, packed = dist.get_rank(), [], []
    is_behind = engine.Engine._is_behind

    def noted(self: engine.Engine) -> bool:
        packed.append(is_behind(self))
        return packed[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_MOST_WAITING", most_waiting)
        patch.setattr(engine.Engine, "_is_behind", noted)
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attached(optimizer, model, compression=method, bucket_mb=0.004) as reducer:
            for step in range(5):
                optimizer.zero_grad()
                torch.manual_seed(10 * step + rank)
                x = torch.randn(4, 24)
                if step == 4 and rank == 1:
                    x[0, 0] = math.inf
                model(x).square().mean().backward()
                found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                if step < 4:
                    optimizer.step()
            found += [t for entry in own_state(reducer).values() for t in entry.values()]
            return found, [sum(packed), len(packed)], reducer.stats()["last_nonfinite"]


@pytest.mark.parametrize("method", METHODS)
@on_ranks(2)
def test_the_same_bits(method: str) -> None:
    wanted, (none, _), source = train(METHODS[method], 1000)
    got, (ahead, launched), found = train(METHODS[method], -1)
    assert none == 0
    assert ahead == launched > 20
    for x, y in zip(wanted, got, strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=0.0, equal_nan=True)
    assert found == source
    assert source is not None
    assert source.endswith("on rank 1")


@pytest.mark.parametrize("method", ["dense", "fp16", "topk"])
@on_ranks(2)
def test_gradients_are_freed_once_packed(method: str) -> None:
    """Whatever the communication thread does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_MOST_WAITING", -1)
        weight = nn.Parameter(torch.zeros(300, 400))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        kept: list[weakref.ref[torch.Tensor]] = []
        exchange_of = engine.Engine._exchange_of

        def noted(self: engine.Engine, sent: Any, grads: Any, number: int) -> Any:
            kept.append(weakref.ref(grads[0]))
            job = exchange_of(self, sent, list(grads), number)
            grads.clear()
            weight.grad = None
            is_first = len(kept) == 1  # whose gradient lies in the bucket
            assert is_first or kept[-1]() is None, "something refers to a gradient that has been packed"
            weight.grad = sent.bucket.views[0]
            return job

        patch.setattr(engine.Engine, "_exchange_of", noted)
        with attached(optimizer, [("weight", weight)], compression=METHODS[method]):
            for step in range(3):
                optimizer.zero_grad()
                (weight * (step + 1.0)).sum().backward()
                optimizer.step()
        assert len(kept) == 3


@pytest.mark.parametrize("method", ["dense", "topk"])
@on_ranks(2)
def test_gradients_of_the_first_pass_wait_in_their_buckets(method: str) -> None:
    """It only counts them, and would else need memory for all of them beside the buckets."""
    model = nn.Sequential(*(nn.Linear(9, 9, bias=False) for _ in range(6)))
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def note(param: torch.Tensor) -> None:
        assert param.grad is not None
        alive.append(sum(each() is not None for each in made))
        made.append(weakref.ref(param.grad))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)
    with attached(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=METHODS[method]):
        model(torch.ones(1, 9)).sum().backward()
        assert alive == [0] * 6
