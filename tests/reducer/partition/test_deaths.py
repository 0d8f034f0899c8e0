"""A rank dies in a step that all take together: parameters are old, or new, or not to be used."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import pycomm
from pycomm.optim.fused import KernelStep
from pycomm.training.reducer.partition.sharding import StepPartition
from tests.on_ranks import Pools
from tests.reducer.partition.stepping import Weights, assert_unusable_until_loaded, backward, gradients_of, rank

POINTS = (
    "before the step",
    "in it, before writing",
    "after half of its writing",
    "after its writing",
    "after the step",
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, reducer: pycomm.Reducer, optimizer: torch.optim.Optimizer) -> None:
    """Have this rank die at ``point`` of its next step."""
    partition = reducer._table.partition
    assert isinstance(partition, StepPartition)
    parts: dict[str, Any] = vars(partition)
    if point == "before the step":
        parts["_prepare"] = lambda *_: die()
    elif point == "in it, before writing":
        vars(partition._stepper)["update"] = lambda *_: die()
    elif point == "after half of its writing":
        assert isinstance(partition._stepper, KernelStep)
        original = partition._stepper.update

        def update(*arguments: Any) -> None:
            group = optimizer.param_groups[0]
            group["params"], kept = group["params"][: len(group["params"]) // 2], group["params"]
            original(*arguments)
            group["params"] = kept
            die()

        vars(partition._stepper)["update"] = update
    elif point == "after its writing":
        original_barrier = partition._communicator.barrier

        def barrier() -> None:
            die()
            original_barrier()

        vars(partition._communicator)["barrier"] = barrier


def values_before_and_after() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters before and after the second step, from one process that takes both."""
    model = Weights()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    pycomm.fuse(optimizer)
    values = []
    for number in range(2):
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(0, number))
        optimizer.step()
        values.append([p.detach().clone() for p in model.parameters()])
    return values[0], values[1]


def lose_a_rank(point: str) -> str:
    """Return what the parameters of a rank that is left are: "old", "new" or "unusable"."""
    model = Weights()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=20, check_replicas=0), shard="optimizer")

    def step(number: int) -> None:
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(0, number))
        if number == 1 and rank() == 1:
            arm(point, reducer, optimizer)
        optimizer.step()
        if number == 1 and rank() == 1:
            die()

    step(0)
    old, new = values_before_and_after()

    def until_it_is_noticed() -> None:
        step(1)
        optimizer.zero_grad()
        backward(model.parameters(), gradients_of(0, 2))

    with pytest.raises(pycomm.CommError, match="rank 1"):
        until_it_is_noticed()
    found = [p.detach().clone() for p in model.parameters()]
    if all(torch.equal(p, q) for p, q in zip(found, old, strict=True)) and _usable(model):
        return "old"
    if all(torch.equal(p, q) for p, q in zip(found, new, strict=True)) and _usable(model):
        return "new"
    assert_unusable_until_loaded(reducer, optimizer, model, model)
    return "unusable"


def _usable(model: Weights) -> bool:
    try:
        model()
    except RuntimeError:
        return False
    return True


@pytest.mark.behavior(
    "Sharded steps",
    "lose a rank in a step",
    "`CommError`. All parameters are new, or training refuses until you load a checkpoint.",
)
@pytest.mark.parametrize("point", POINTS)
def test_no_mixture_trains_on(point: str, new_ranks: Pools) -> None:
    outcomes = new_ranks(4).outcomes(lose_a_rank, point, timeout=60.0)
    assert isinstance(outcomes[1].error, ChildProcessError)
    left = [outcomes[0], *outcomes[2:]]
    assert [outcome.error for outcome in left] == [None] * 3, [outcome.trace for outcome in left]
    found = {outcome.result for outcome in left}
    if point == "after the step":
        assert found == {"new"}
    elif point == "after its writing":
        assert found <= {"new", "unusable"}
    else:
        assert found == {"unusable"}
