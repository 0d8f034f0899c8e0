"""The ``repr`` of users' objects: before anything is planned, in use, and after the end."""

from __future__ import annotations

import torch
from torch import nn

import pycomm
from pycomm.descriptions import settings_text, size_text
from tests.on_ranks import on_ranks
from tests.reducer.attaching import attached, over_tcp
from tests.reducer.models import loss_of, make_model, sgd


def float_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 250), nn.Tanh(), nn.Linear(250, 2))  # 4 parameters, 103,008 bytes


@on_ranks(2)
def test_reducer() -> None:
    model = float_model()
    optimizer = sgd(model)
    for compression, said in ((None, "2 buckets ... dense"), (pycomm.TopK(0.25), "3 buckets ... TopK(ratio=0.25)")):
        with attached(optimizer, model, compression=compression, bucket_mb=0.05) as reducer:
            plan = f"2 ranks, shared_memory, 4 parameters in {said}".replace(" ...", " of 103 KB in all,")
            assert repr(reducer) == f"Reducer({plan})"
            model(torch.ones(1, 100)).sum().backward()
            assert repr(reducer) == f"Reducer({plan})"
        assert repr(reducer) == "Reducer(detached after 1 reduction)"
        reducer.detach()
        assert repr(reducer) == "Reducer(detached after 1 reduction)"
    with over_tcp(), attached(optimizer, model, on_failure="shrink") as reducer:
        assert repr(reducer).startswith("Reducer(2 ranks, tcp, 4 parameters in ")
        assert repr(reducer).endswith("of 103 KB in all, dense, survive=Survive())")
    with attached(optimizer, model, shard="optimizer") as reducer:
        assert repr(reducer).endswith("of 103 KB in all, dense, shard=Sharding('optimizer'))")


@on_ranks(2)
def test_reducer_that_nothing_is_planned_for_yet() -> None:
    """All parameters are frozen at first."""
    model = float_model().requires_grad_(False)
    with attached(sgd(model), model) as reducer:
        assert repr(reducer) == "Reducer(2 ranks, shared_memory, 0 parameters of 0 B, dense)"
        model.requires_grad_(True)
        model(torch.ones(1, 100)).sum().backward()
        assert repr(reducer).startswith("Reducer(2 ranks, shared_memory, 4 parameters in ")


@on_ranks(1)
def test_reducer_of_one_rank() -> None:
    model = float_model()
    with attached(sgd(model), model) as reducer:
        assert repr(reducer) == "Reducer(1 rank, shared_memory, 4 parameters of 103 KB, dense)"
    assert repr(reducer) == "Reducer(detached after 0 reductions)"


@on_ranks(2)
def test_averagers() -> None:
    model = make_model().float()
    optimizer = sgd(model)
    parameters = "6 parameters of 7.62 KB"
    averager = pycomm.local_sgd(optimizer, model, every=4, timeout=30)
    assert repr(averager) == f"LocalAverager(2 ranks, shared_memory, {parameters} in 1 fragment, every 4 steps, dense)"
    averager.detach()
    assert repr(averager) == "LocalAverager(detached)"
    averager = pycomm.local_sgd(
        *(optimizer, model),
        every=4,
        fragments=2,
        delay=1,
        outer=pycomm.Nesterov(0.5),
        compression=pycomm.FP16(),
        timeout=30,
    )
    assert repr(averager) == (
        f"LocalAverager(2 ranks, shared_memory, {parameters} in 2 fragments, every 4 steps with a delay of 1, "
        "Nesterov(lr=0.5), FP16())"
    )
    averager.detach()
    averager = pycomm.local_sgd(optimizer, model, every=1, outer=pycomm.Elastic(0.8), timeout=30)
    assert repr(averager).endswith("in 1 fragment, every 1 step, Elastic(strength=0.8), dense)")
    averager.detach()
    mixer = pycomm.gossip(optimizer, model, topology="ring", timeout=30)
    assert repr(mixer) == f"Gossip(2 ranks, shared_memory, {parameters}, ring, every 1 step)"
    mixer.detach()
    assert repr(mixer) == "Gossip(detached)"


@on_ranks(2)
def test_parameter_server() -> None:
    model = make_model().float()
    server = pycomm.parameter_server(sgd(model), model, servers=1, timeout=30)
    me = "worker 1" if server.is_worker else "server 0"
    said = f"ParameterServer({me}, 1 server, 6 parameters of 7.62 KB, mode=Async(), dense)"
    assert repr(server) == said
    if server.is_worker:
        with server.step():
            loss_of(model, 1, 0).backward()
        assert repr(server) == said
    server.close()
    assert repr(server) == f"ParameterServer({me}, closed)"


def test_words() -> None:
    assert [size_text(n) for n in (0, 999, 11_200_000, 3e9)] == ["0 B", "999 B", "11.2 MB", "3 GB"]
    assert settings_text(pycomm.DGC(0.01, momentum=0.5)) == "DGC(ratio=0.01, momentum=0.5)"
    assert settings_text(pycomm.FP16()) == "FP16()"
    assert settings_text(pycomm.FP16) == "<class 'pycomm.compression.methods.half.FP16'>"
