"""Broadcasts of parameters, optimizer state and objects."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.horovod.training import batch_of, loss_of, make_model
from tests.horovod.worlds import horovod
from tests.on_ranks import on_ranks

THINGS: list[Any] = [
    None,
    True,
    3,
    -2.5,
    float("inf"),
    1 + 2j,
    "text",
    b"bytes",
    [1, [2, (3, "x")]],
    {1, 2},
    frozenset({"a"}),
    {"a": 1, 2: "b", (1, "k"): None, None: [()]},
    OrderedDict([("z", 1), ("a", 2)]),
    torch.float16,
    np.int64(4),
]


@on_ranks(2)
def test_objects() -> None:
    with horovod() as hvd:
        for thing in THINGS:
            got = hvd.broadcast_object(thing if hvd.rank() == 1 else "other", root_rank=1)
            assert got == thing
            assert type(got) is type(thing) or isinstance(thing, np.generic)
        state: dict[str, Any] = {
            "x": torch.arange(3),
            "y": torch.ones(2, 2, dtype=torch.bfloat16),
            "n": np.arange(4.0).reshape(2, 2),
        }
        got = hvd.broadcast_object(state if hvd.rank() == 0 else None, name="state")
        assert torch.equal(got["x"], state["x"])
        assert torch.equal(got["y"], state["y"])
        assert np.array_equal(got["n"], state["n"])
        everyones = hvd.allgather_object({"rank": hvd.rank(), "long": "x" * hvd.rank() * 1000})
        assert [each["rank"] for each in everyones] == [0, 1]
        assert [len(each["long"]) for each in everyones] == [0, 1000]
        for root in range(2):
            kind = TypeError if hvd.rank() == root else hvd.InvalidRequestError
            with pytest.raises(kind, match="obj"):
                hvd.broadcast_object(nn.Linear(2, 2) if hvd.rank() == root else 1, root_rank=root)
        kind, message = (
            (TypeError, "Linear, wanted numbers") if hvd.rank() == 0 else (hvd.InvalidRequestError, "obj of rank 0")
        )
        with pytest.raises(kind, match=message):
            hvd.allgather_object([nn.Linear(2, 2)] if hvd.rank() == 0 else 1)
        assert hvd.allgather_object(1) == [1, 1]


@on_ranks(2)
def test_parameters() -> None:
    with horovod() as hvd:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        for p in model.parameters():
            nn.init.constant_(p, 1.0 + hvd.rank())
        for given in (model.state_dict(), list(model.named_parameters()), model.named_parameters()):
            hvd.broadcast_parameters(given, root_rank=1)
            assert all(p.unique().tolist() == [2.0] for p in model.parameters())
        tensors = [torch.full((2,), float(hvd.rank()))]
        hvd.broadcast_parameters(tensors, root_rank=0)
        assert tensors[0].tolist() == [0.0, 0.0]
        with pytest.raises(TypeError, match="params is a Sequential, wanted model.state_dict"):
            hvd.broadcast_parameters(model, root_rank=0)
        with pytest.raises(hvd.HorovodInternalError, match="disagree"):
            hvd.broadcast_parameters({"w": torch.ones(2 + hvd.rank())}, root_rank=0)


@on_ranks(2)
def test_optimizer_state() -> None:
    with horovod() as hvd:
        rank = hvd.rank()
        for make in (
            lambda m: torch.optim.SGD(m.parameters(), lr=0.1 * (rank + 1), momentum=0.9),
            lambda m: torch.optim.AdamW(m.parameters(), lr=0.1 * (rank + 1), betas=(0.9 - 0.1 * rank, 0.99)),
            lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1 * (rank + 1)),
        ):
            for wrapped in (False, True):
                model = make_model()
                optimizer: Any = make(model)
                if wrapped:
                    hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
                elif rank == 0:
                    loss_of(model, batch_of(rank, 0)).backward()
                    optimizer.step(lambda model=model: loss_of(model, batch_of(rank, 0)))
                    optimizer.zero_grad()
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
                assert optimizer.param_groups[0]["lr"] == 0.1
                states = hvd.allgather_object(optimizer.state_dict())
                assert str(states[0]) == str(states[1])
                assert not states[0]["state"] or not wrapped
        three = torch.optim.SGD(list(make_model().parameters())[: 2 + rank], lr=0.1)
        with pytest.raises(ValueError, match="does not fit rank 1: its parameter groups have"):
            hvd.broadcast_optimizer_state(three, root_rank=0)
        with pytest.raises(TypeError, match="optimizer is a Sequential"):
            hvd.broadcast_optimizer_state(make_model(), root_rank=0)
