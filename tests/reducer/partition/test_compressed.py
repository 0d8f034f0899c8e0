"""Sharded steps with compression of gradients, which go to their owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pycomm
from tests.compression.test_methods import leaves_no_trace
from tests.compression.test_two_hop import Sent
from tests.hosts import on_hosts
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached
from tests.reducer.partition import test_same_steps as whole
from tests.reducer.partition.stepping import OPTIMIZERS, Weights, assert_same, backward, gradients_of, rank
from tests.reducer.partition.test_spread import assert_same_as_alone, hosts

ALIGNED = [pycomm.Int8(block=64), pycomm.Int4(block=64), pycomm.FP8(block=64), pycomm.FP8("e5m2", block=64)]
"""Methods whose blocks fill shares, which begin at multiples of 64: so blocks are the same without shares."""


@pytest.mark.parametrize("method", ALIGNED, ids=repr)
@on_ranks(2)
def test_two_hosts_have_the_bits_of_a_step_alone(method: Any) -> None:
    """Among two hosts messages are gathered without shares: rounded once, as with them."""
    for body in (whole.few_steps, whole.new_parameters, whole.kept_gradients, whole.missing_gradients):
        assert_same_as_alone("Adam", body, "own gradients", compression=method)
    assert_same_as_alone("LAMB", whole.few_steps, "own gradients", compression=method)


@on_ranks(2)
def test_ranks_of_one_host_have_the_bits_of_a_step_alone() -> None:
    for method in ALIGNED:
        wanted = whole.trained(OPTIMIZERS["Adam"], whole.few_steps, compression=method)
        assert_same(whole.trained(OPTIMIZERS["Adam"], whole.few_steps, compression=method, shard="optimizer"), wanted)


@pytest.mark.parametrize(
    "method", [pycomm.TopK(0.1), pycomm.PowerSGD(1), pycomm.Int8(), pycomm.ChunkTopK(64, decay=1.0)], ids=repr
)
@on_ranks(3)
def test_whole_averages_by_any_method(method: Any) -> None:
    assert_same_as_alone("Adam", whole.few_steps, "all gradients", compression=method)


@on_ranks(2, 3)
def test_momentum_correction() -> None:
    assert_same_as_alone("plain SGD", whole.few_steps, "all gradients", compression=pycomm.DGC(0.1))


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "onebit", "qsgd", "terngrad"])
@pytest.mark.parametrize("layout", ["ab", "abc", "aabb", "aa"])
def test_an_overflow_leaves_no_trace(rank_pools: Pools, layout: str, name: str) -> None:
    rank_pools(len(layout)).run(overflow_on, layout, name)


def overflow_on(layout: str, name: str) -> None:
    with on_hosts(layout):
        leaves_no_trace(name, [(0, 0), (1, 2), (1, 5)], None, {"shard": "optimizer"})
        leaves_no_trace(name, [(1, 1)], 1024.0, {"shard": "optimizer"})


@pytest.mark.parametrize("method", [pycomm.OneBit(), pycomm.QSGD(7), pycomm.FP8(), pycomm.Int4()], ids=repr)
@on_ranks(2, 4)
def test_whole_parameters_of_any_optimizer(method: Any) -> None:
    """Owners of unequal shares, some of which have nothing of a bucket."""
    model = Weights()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizer = torch.optim.Adamax(matrices, lr=0.01)
    with hosts(), attached(optimizer, matrices_of(model), shard="optimizer", compression=method, bucket_mb=0.005) as r:
        for number in range(8):
            optimizer.zero_grad()
            backward(matrices, [g for g in gradients_of(rank(), number) if g.dim() == 2])
            optimizer.step()
        assert r.stats()["step_shares"]
        assert_replicas_equal(nn.ParameterList(matrices))


def matrices_of(model: Weights) -> list[tuple[str, torch.Tensor]]:
    return [(name, p) for name, p in model.named_parameters() if p.dim() == 2]


def bytes_of_steps(layout: str, compression: Any) -> float:
    p = nn.Parameter(torch.zeros(1000, 1000))
    optimizer = torch.optim.SGD([p], lr=0.1)
    options = {"compression": compression, "shard": "optimizer", "check_replicas": 0}
    with on_hosts(layout), attached(optimizer, [("p", p)], **options):
        for _ in range(2):
            sent = Sent()
            optimizer.zero_grad()
            loss: Any = (p * torch.randn(1000, 1000)).sum()
            loss.backward()
            optimizer.step()
            p.sum()
        return sent.num_bytes / p.numel()


@pytest.mark.parametrize("layout", ["ab", "abc", "abcd", "aabb"])
def test_bytes_of_both_halves(rank_pools: Pools, layout: str) -> None:
    """(P - 1) / P of the gradients' messages, and as many of the parameters; of L ranks a host, each has a lane."""
    num_hosts, per_host = len(set(layout)), len(layout) // len(set(layout))
    int8, share = 1 + 4 / 256, (num_hosts - 1) / num_hosts / per_host
    counted = rank_pools(len(layout)).run(bytes_of_steps, layout, pycomm.Int8())
    assert counted == pytest.approx([share * (int8 + 4)] * len(layout), rel=0.02)
