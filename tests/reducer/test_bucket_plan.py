"""Which parameters travel together: small models in several buckets too, the same on all ranks, without other bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached
from tests.reducer.models import sgd

MIB = 2**20


def layers(number: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))


def plan_of(model: nn.Module, hosts: str = "", **options: Any) -> list[tuple[list[str], int]]:
    """Return the names and bytes of each bucket, which are equal on all ranks."""
    with on_hosts(hosts or "a" * dist.get_world_size()), attached(sgd(model), model, **options) as reducer:
        plan = [(flight.bucket.names, flight.bucket.flat.nbytes) for flight in reducer._table.flights]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, plan)
    assert all(other == plan for other in everyones)
    return plan


def sizes_of(model: nn.Module, **options: Any) -> list[int]:
    return [size for _, size in plan_of(model, **options)]


@on_ranks(2)
def test_small_models_have_four_equal_buckets() -> None:
    model = layers(24, 340)  # 11.1 MB
    sizes = sizes_of(model)
    assert len(sizes) == 4
    assert max(sizes) <= sum(sizes) / 4 + 340 * 340 * 4
    assert len(sizes_of(model, compression=pycomm.FP16())) == 4
    assert len(sizes_of(model, bucket_mb=25)) == 1  # whoever says so
    assert len(sizes_of(model, bucket_mb=1)) > 8


@on_ranks(2)
def test_no_bucket_is_too_small_to_pay() -> None:
    assert len(sizes_of(layers(4, 64))) == 1
    assert len(sizes_of(layers(8, 256))) in (2, 3)  # 2.1 MB
    large = sizes_of(layers(30, 1024))  # 126 MB
    assert len(large) >= 5
    assert max(large) <= 25 * MIB


@on_ranks(2)
def test_methods_that_work_bucket_by_bucket_keep_theirs_large() -> None:
    for method in (pycomm.TopK(0.01), pycomm.Int8()):
        assert len([size for size in sizes_of(layers(24, 340), compression=method) if size > MIB]) == 1


@on_ranks(2)
def test_a_bias_does_not_travel_alone_before_a_large_matrix() -> None:
    model = nn.Sequential(nn.Linear(784, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10))
    assert [sorted(names) for names, _ in plan_of(model)] == [
        ["2.bias", "3.bias", "3.weight"],  # the first one is small: its gradients are there at once
        ["2.weight"],
        ["1.bias", "1.weight"],
        ["0.bias", "0.weight"],
    ]


@on_ranks(4)
def test_between_hosts_buckets_grow_from_a_small_one() -> None:
    sizes = sizes_of(layers(24, 340), hosts="abcd")
    assert sizes[0] <= MIB
    assert len(sizes) == 3


@pytest.mark.parametrize("average", [True, False])
@on_ranks(2, 3)
def test_the_bits_are_those_of_one_bucket(average: bool) -> None:
    results = []
    for bucket_mb in (None, 25, 1):
        model = layers(8, 400)  # 5.1 MB
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        with attached(optimizer, model, bucket_mb=bucket_mb, average=average) as reducer:
            generator = torch.Generator().manual_seed(dist.get_rank())
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 400, generator=generator)).square().mean().backward()
                optimizer.step()
            assert reducer.stats()["num_buckets"] == {None: 4, 25: 1, 1: 8}[bucket_mb]
            assert_replicas_equal(model)
        results.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
