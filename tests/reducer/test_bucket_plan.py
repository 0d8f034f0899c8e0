"""Which parameters travel together: small models in several buckets too, the same on all ranks, without other bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.hosts import on_hosts
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, own_state
from tests.reducer.models import sgd
from tests.reducer.test_gpu_path import pretended_gpu

MIB = 2**20


def layers(number: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(number)))


def plan_of(model: nn.Module, hosts: str = "", **options: Any) -> list[tuple[list[str], int]]:
    """Return the names and bytes of each bucket, which are equal on all ranks."""
    with on_hosts(hosts or "a" * dist.get_world_size()), attached(sgd(model), model, **options) as reducer:
        plan = [(sent.bucket.names, sent.bucket.flat.nbytes) for sent in reducer._table.buckets]
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


@on_ranks(2)
def test_on_a_gpu_too_unless_little_is_sent() -> None:
    with pretended_gpu():
        assert [size <= MIB for size in sizes_of(layers(24, 340))] == [True, False, False]
        assert max(sizes_of(layers(24, 340), compression=pycomm.TopK(0.01))) > 4 * MIB


@on_ranks(2)
def test_a_captured_step_keeps_its_buckets() -> None:
    """Its graph has their addresses."""
    model = FromTheHead(6, 64)
    with pretended_gpu(), attached(sgd(model), model, bucket_mb=1 / 64) as reducer:
        before = reducer._engine.table.buckets
        for step in range(4):
            with pytest.MonkeyPatch.context() as context:
                context.setattr(torch.cuda, "is_initialized", lambda: True)
                context.setattr(torch.cuda, "is_current_stream_capturing", lambda step=step: step == 1)
                model(torch.ones(2, 64)).sum().backward()
            reducer.optimizer.step()
            reducer.optimizer.zero_grad()
        assert reducer._engine.table.buckets is before


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


class FromTheHead(nn.Module):
    """A model whose layers are registered in the reverse order of their use, and a parameter without a use."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(width))
        self.layers = layers(number, width)
        self.width, self.starts_at_the_head = width, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in sorted(range(len(self.layers)), reverse=not self.starts_at_the_head):
            x = self.layers[number](x)
        return x


def steps_of(model: FromTheHead, number: int, **options: Any) -> tuple[list[tuple[int, int]], list[list[str]]]:
    """Train; return for each step how many buckets were launched as the last gradient arrived, and their number."""
    optimizer, found, launched = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), [], [0]
    last = model.layers[-1]
    with attached(optimizer, model, **options) as reducer:
        engine = reducer._engine
        for param in last.parameters():
            param.register_post_accumulate_grad_hook(lambda _: launched.append(engine.step_state.launched))
        for step in range(number):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(torch.ones(2, model.width) * (1 + dist.get_rank())).square().mean().backward()
            optimizer.step()
            found.append((launched[-1], len(engine.table.buckets)))
        plan = [sent.bucket.names for sent in engine.table.buckets]
        assert_replicas_equal(model)
    return found, plan


@on_ranks(2)
def test_from_the_second_step_on_buckets_are_in_the_order_of_arrival() -> None:
    counts, plan = steps_of(FromTheHead(24, 340), 3)
    assert counts == [(0, 5), (3, 5), (3, 5)]
    assert "layers.0.weight" in plan[0]
    assert plan[-1] == ["unused"], "a gradient that does not come holds nothing up"
    counts, same = steps_of(FromTheHead(24, 340), 2, compression=pycomm.DGC(1.0, 0.0, clip_local_norm=1.0))
    assert [launched for launched, _ in counts] == [0, 0], "nothing can be sent early"
    assert same != plan


@on_ranks(2)
def test_rank_0_has_the_say_and_a_rank_without_a_second_pass_follows() -> None:
    model, plan = FromTheHead(6, 64), []
    model.starts_at_the_head = dist.get_rank() == 1
    with attached(sgd(model), model, bucket_mb=1 / 64) as reducer:
        for step in range(2):
            model.zero_grad()
            if step == 1 and dist.get_rank() == 1:
                reducer.skip_batch()
            else:
                model(torch.ones(2, 64)).sum().backward()
            reducer.skip_step()
        plan = [sent.bucket.names for sent in reducer._table.buckets]
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, plan)
    assert plans[0] == plans[1]
    assert plan[0] == ["layers.0.bias"]


@on_ranks(2)
def test_a_second_backward_on_averages_is_an_error_although_buckets_were_sorted() -> None:
    model = FromTheHead(6, 64)
    with attached(sgd(model), model, compression=pycomm.TopK(0.1), bucket_mb=1 / 64) as reducer:
        model(torch.ones(2, 64)).sum().backward()
        reducer.skip_step()
        with pytest.raises(RuntimeError, match="ran again on the averaged gradient"):
            model(torch.ones(2, 64)).sum().backward()


@pytest.mark.parametrize("method", [pycomm.NoCompression(), pycomm.TopK(0.1), pycomm.DGC(0.1), pycomm.PowerSGD(1)])
@on_ranks(2)
def test_sorted_buckets_have_the_averages_and_the_state_of_those_before(method: Any) -> None:
    model = FromTheHead(6, 64)
    options = {"bucket_mb": 1 / 64, "compression": method}
    with attached(sgd(model), model, **options) as reducer:
        for step in range(2):
            model(torch.ones(2, 64) * dist.get_rank()).square().mean().backward()
            reducer.optimizer.step()
            if step == 0:
                before = reducer._engine.table.buckets
                state, grads = copy.deepcopy(own_state(reducer)), copy.deepcopy(reducer._engine.table.gradients())
                ratio = reducer.stats()["compression_ratio"]
                assert reducer._passes._order.apply()
                assert before != reducer._engine.table.buckets
                assert reducer.stats()["compression_ratio"] == ratio
                torch.testing.assert_close(own_state(reducer), state, rtol=0, atol=0)
                torch.testing.assert_close(reducer._engine.table.gradients(), grads, rtol=0, atol=0)
                assert all(slot.untouched() for slot in reducer._engine.table.slots())
                reducer._passes.hook_parameters(reducer._engine.table.slots())
            reducer.optimizer.zero_grad(set_to_none=False)
        saved = reducer.state_dict()
    model = FromTheHead(6, 64)
    with attached(sgd(model), model, **options) as reducer:
        reducer.load_state_dict(saved)
        torch.testing.assert_close(own_state(reducer), own_state(saved))


@on_ranks(2)
def test_sorted_buckets_on_a_gpu_know_whose_gradient_was_not_finite_before() -> None:
    model = FromTheHead(6, 64)
    options = {"bucket_mb": 1 / 64, "compression": pycomm.TopK(0.1)}
    with pretended_gpu(), attached(sgd(model), model, **options) as reducer:
        name = "layers.3.weight"
        handle = model.get_parameter(name).register_hook(lambda grad: grad * (torch.nan if dist.get_rank() else 1.0))
        model(torch.ones(2, 64)).square().mean().backward()
        handle.remove()
        reducer.skip_step()
        assert reducer._passes._order.apply()
        assert reducer.stats()["last_nonfinite"] == f"parameter {name!r} on rank 1"
