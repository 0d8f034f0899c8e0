"""Whose gradient was not finite: all ranks know it, and steps that are finite send nothing for it."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.compression import Compression
from tests.on_ranks import Pools, on_ranks
from tests.reducer.attaching import attached, over_tcp
from tests.reducer.models import loss_of, make_model, sgd

METHODS: dict[str, Compression | None] = {
    "none": None,
    "fp16": pycomm.FP16(),
    "bf16": pycomm.BF16(),
    "topk": pycomm.TopK(0.5),
}


class Training:
    """Training in which gradients of some ranks are spoiled."""

    def __init__(self, reducer: pycomm.Reducer, model: nn.Module) -> None:
        self.reducer, self.model = reducer, model
        self.rank, self.steps = dist.get_rank(), 0

    def backward(self, *spoiled: str) -> None:
        """Make gradients; those of the parameters ``spoiled`` are NaN on this rank."""
        self.reducer.optimizer.zero_grad()
        handles = [self.model.get_parameter(name).register_hook(lambda grad: grad * math.nan) for name in spoiled]
        loss_of(self.model, self.rank, self.steps).backward()
        for handle in handles:
            handle.remove()
        self.steps += 1

    def told(self) -> str | None:
        told: str | None = self.reducer.stats()["last_nonfinite"]
        return told


@contextlib.contextmanager
def training(**options: Any) -> Iterator[Training]:
    model = make_model(dtype=torch.float32)
    with attached(sgd(model), model, **{"bucket_mb": 1e-3, "check_replicas": 0, **options}) as reducer:
        yield Training(reducer, model)


def operations(reducer: pycomm.Reducer) -> int:
    return sum(lane.channel.recorder.count for lane in reducer._engine.lanes)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, options) for method in METHODS for options in ({}, {"on_failure": "shrink"})),
        *((method, {"shard": "optimizer"}) for method in METHODS if method != "topk"),
    ],
    ids=str,
)
@on_ranks(2, 3)
def test_all_ranks_know_the_parameter_and_the_rank(method: str, options: dict[str, Any]) -> None:
    with training(compression=METHODS[method], **options) as run:
        run.backward()
        assert run.told() is None
        last = dist.get_world_size() - 1
        for name in ("2.weight", "0.bias"):
            run.backward(*[name] if run.rank == last else [])
            assert run.told() == f"parameter {name!r} on rank {last}"
        run.backward()  # finite: the last one that was not is still the same
        assert run.told() == f"parameter '0.bias' on rank {last}"


@on_ranks(2, 3)
def test_over_torch() -> None:
    with over_tcp(), training() as run:
        run.backward(*["2.bias"] if run.rank == 1 else [])
        assert run.told() == "parameter '2.bias' on rank 1"
        run.backward()
        assert all(bool(torch.isfinite(p.grad).all()) for p in run.model.parameters() if p.grad is not None)


@on_ranks(3)
def test_of_several_ranks_the_first_is_told() -> None:
    with training() as run:
        run.backward(*[[], ["2.weight"], ["0.weight", "0.bias"]][run.rank])
        assert run.told() == "parameter '2.weight' on rank 1"


@pytest.mark.parametrize("options", [{}, {"on_failure": "shrink"}], ids=str)
@on_ranks(2)
def test_only_steps_that_are_not_finite_send_anything_for_it(options: dict[str, Any]) -> None:
    with training(**options) as run:
        costs = []
        for spoiled in ([], [], [], ["2.weight"], []):
            before = operations(run.reducer)
            run.backward(*spoiled)
            costs.append(operations(run.reducer) - before)
        buckets = len(run.reducer._engine.table.buckets)
        assert buckets > 1
        commit = int("on_failure" in options)
        # The order of the buckets is agreed on after the first step.
        assert costs[2:] == [buckets + commit, buckets + commit + 2, buckets + commit]  # lengths and names


@on_ranks(2)
def test_a_source_of_an_earlier_step_is_not_taken_for_that_of_a_later_one() -> None:
    with training(compression=pycomm.TopK(0.5), average=False) as run:
        run.backward(*["0.bias"] if run.rank == 1 else [])  # travels as it is
        assert run.told() == "parameter '0.bias' on rank 1"
        run.backward(*["0.weight"] if run.rank == 0 else [])  # is compressed
        assert run.told() == "parameter '0.weight' on rank 0"
        run.backward(*["2.bias"] if run.rank == 1 else [])
        assert run.told() == "parameter '2.bias' on rank 1"
        handle = run.model.get_parameter("0.weight").register_hook(lambda grad: torch.full_like(grad, 3e38))
        run.backward()  # finite on each rank; the sum is not
        handle.remove()
        assert run.told() == "a sum over the ranks"
        assert run.reducer.stats()["nonfinite_steps"] == 4


@on_ranks(2)
def test_the_row_of_rank_0_names_a_gradient_of_rank_1() -> None:
    with training() as run:
        rows: list[dict[str, Any]] = []
        monitored = pycomm.monitor(run.reducer, every=1, to=rows.append) if run.rank == 0 else contextlib.nullcontext()
        with monitored:
            for spoiled in ([], ["2.weight"] if run.rank == 1 else []):
                run.backward(*spoiled)
                run.reducer.optimizer.step()
        if run.rank == 0:
            assert [row["last_nonfinite"] for row in rows] == [None, "parameter '2.weight' on rank 1"]


def die_while_ranks_tell_each_other(on_failure: str, over_hosts: bool) -> tuple[tuple[int, ...], str | None]:
    """Spoil a gradient of rank 1; rank 2 dies when it is about to hear of it."""
    with over_tcp(over_hosts), training(on_failure=on_failure) as run:
        if run.rank == 2:
            vars(run.reducer._engine.reduction.source)["share"] = lambda *_: os._exit(1)
        run.backward(*["2.weight"] if run.rank == 1 else [])
        return run.reducer.world, run.told()


@pytest.mark.parametrize("over_hosts", [False, True], ids=["shared memory", "tcp"])
def test_a_rank_that_is_lost_then_is_an_error(new_ranks: Pools, over_hosts: bool) -> None:
    outcomes = new_ranks(3).outcomes(die_while_ranks_tell_each_other, "raise", over_hosts, timeout=50.0)
    assert all(isinstance(outcome.error, pycomm.CommError) for outcome in outcomes[:2]), outcomes


@pytest.mark.parametrize("over_hosts", [False, True], ids=["shared memory", "tcp"])
def test_those_that_are_left_reduce_the_step_again_and_know_it(new_ranks: Pools, over_hosts: bool) -> None:
    outcomes = new_ranks(3).outcomes(die_while_ranks_tell_each_other, "shrink", over_hosts, timeout=50.0)
    assert [outcome.result for outcome in outcomes[:2]] == [((0, 1), "parameter '2.weight' on rank 1")] * 2, outcomes
