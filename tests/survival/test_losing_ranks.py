"""``attach(on_failure="shrink")``: the ranks that are left go on, with the step that was under way."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pycomm import CommError
from pycomm.training.reductions.reduction import Reduction
from tests.on_ranks import Pools
from tests.ranks import RankOutcome
from tests.survival.training import METHODS, Plan, expected, train

TIMEOUT = 50.0


def survivors(pools: Pools, size: int, plan: Plan) -> list[dict[str, Any]]:
    """What the ranks that were not lost tell; they are equal to the bit, and so are their views of the world."""
    outcomes = pools(size).outcomes(train, plan, timeout=TIMEOUT)
    lost = {rank for rank, _ in plan.faults}
    for rank, outcome in enumerate(outcomes):
        assert (outcome.error is None) == (rank not in lost), f"rank {rank}: {outcome.trace}"
    told = [outcome.result for outcome in outcomes if outcome.error is None]
    assert len({each["digest"] for each in told}) == 1
    for each in told:
        assert each["world"] == tuple(rank for rank in range(size) if rank not in lost)
        assert each["changes"][-1][1] == each["world"]
        left = {rank: fate for recovery in each["recoveries"] for rank, fate in recovery["left"].items()}
        assert set(left) == lost
    events = [line.partition(":")[0] for each in told for line in each["logged"]]
    assert len(events) == len(set(events)), f"one event is logged by several ranks: {events}"
    assert told[0]["logged"], "the first that is left has logged nothing"
    return told


def close_to(told: list[dict[str, Any]], wanted: list[torch.Tensor]) -> None:
    for mine, right in zip(told[0]["parameters"], wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("faults", "worlds"),
    [
        ({(2, 5): "die"}, [(0, 1, 2, 3)] * 5 + [(0, 1, 3)] * 7),
        ({(0, 0): "die"}, [(1, 2, 3)] * 12),
        ({(0, 4): "die", (3, 4): "die"}, [(0, 1, 2, 3)] * 4 + [(1, 2)] * 8),
        ({(0, 4): "die", (1, 5): "die", (2, 6): "die"}, [(0, 1, 2, 3)] * 4 + [(1, 2, 3), (2, 3)] + [(3,)] * 6),
    ],
    ids=["one", "rank 0 in the first step", "two at once", "one after the other"],
)
@pytest.mark.parametrize(
    "variant",
    ["plain", *(pytest.param(each, marks=pytest.mark.slow) for each in ("accumulated", "in place")), "weighted"],
)
def test_the_step_is_reduced_again_over_those_that_are_left(
    new_ranks: Pools, faults: dict[tuple[int, int], str], worlds: list[tuple[int, ...]], variant: str
) -> None:
    plan = Plan(
        faults=faults,
        accumulate=2 if variant in ("accumulated", "weighted") else 1,
        weighted=variant == "weighted",
        set_to_none=variant != "in place",
    )
    told = survivors(new_ranks, 4, plan)
    close_to(told, expected(plan, worlds))
    assert len(told[0]["losses"]) == plan.steps * plan.accumulate, "a backward pass was repeated"


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`... ranks go on`",
    "With `survive`: says who was lost, and why, or who has joined.",
)
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method(new_ranks: Pools, method: str) -> None:
    told = survivors(new_ranks, 4, Plan(method=method, faults={(1, 5): "die", (0, 8): "die"}, steps=40))
    assert told[0]["losses"][-1] < told[0]["losses"][0]


@pytest.mark.parametrize("method", [pytest.param("dense", marks=pytest.mark.slow), "topk"])
@pytest.mark.parametrize(
    ("hosts", "faults"),
    [
        ("aabb", {(1, 5): "die", (2, 8): "die"}),
        ("aabb", {(0, 5): "die", (1, 5): "die"}),
        ("abc", {(0, 5): "die"}),
        pytest.param("abca", {(3, 4): "die", (0, 4): "die", (1, 8): "die"}, marks=pytest.mark.slow),
    ],
)
def test_several_hosts(new_ranks: Pools, hosts: str, faults: dict[tuple[int, int], str], method: str) -> None:
    survivors(new_ranks, len(hosts), Plan(method=method, hosts=hosts, faults=faults))


def errors_of(outcomes: list[RankOutcome], rank: int, *others: int) -> BaseException:
    for other in others:
        assert outcomes[other].error is None, outcomes[other].trace
    error = outcomes[rank].error
    assert error is not None
    return error


@pytest.mark.behavior(
    "Lost, late and unreachable ranks",
    "`this rank was left behind: it ...`",
    "It was stopped or slow; the others continue without it.",
)
def test_a_rank_that_is_stopped_is_left_behind_and_learns_it(new_ranks: Pools) -> None:
    """It wakes up in the middle of an operation, on memory that nobody uses any more."""
    outcomes = new_ranks(3).outcomes(train, Plan(method="topk", faults={(1, 5): "stop"}, steps=30), timeout=TIMEOUT)
    error = errors_of(outcomes, 1, 0, 2)
    assert isinstance(error, CommError)
    assert "left behind: it is stopped" in str(error)
    assert outcomes[0].result["digest"] == outcomes[2].result["digest"]


def test_a_rank_that_hangs_is_left_behind_after_the_timeout(new_ranks: Pools) -> None:
    plan = Plan(faults={(2, 3): "hang"}, options={"timeout": 1.0})
    outcomes = new_ranks(3).outcomes(train, plan, timeout=TIMEOUT)
    error = errors_of(outcomes, 2, 0, 1)
    assert isinstance(error, CommError)
    assert "left behind: it was waited for in vain" in str(error)
    assert outcomes[0].result["recoveries"][0]["left"] == {2: "was waited for in vain"}


def test_a_rank_whose_hook_raises_leaves(new_ranks: Pools) -> None:
    outcomes = new_ranks(3).outcomes(train, Plan(faults={(0, 3): "fail"}), timeout=TIMEOUT)
    error = errors_of(outcomes, 0, 1, 2)
    assert isinstance(error, ValueError)
    assert "of the user's" in str(error)
    assert outcomes[1].result["digest"] == outcomes[2].result["digest"]
    assert outcomes[1].result["recoveries"][0]["step"] == 3


def without_memory(plan: Plan) -> dict[str, Any]:
    """Rank 1 has no memory for an exchange of step 4."""
    original, calls = Reduction.run, 0

    def exchange(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if dist.get_rank() == 1 and calls == 4 * 3 + 2:
            raise MemoryError("no memory")
        original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reduction, "run", exchange)
        return train(plan)


@pytest.mark.parametrize("hosts", ["", "aab"])
def test_a_rank_whose_exchange_fails_by_itself_leaves(new_ranks: Pools, hosts: str) -> None:
    """It would be out of step with the others, who would all take that for a mistake in the script."""
    outcomes = new_ranks(3).outcomes(without_memory, Plan(hosts=hosts), timeout=TIMEOUT)
    assert isinstance(errors_of(outcomes, 1, 0, 2), MemoryError)
    assert outcomes[0].result["digest"] == outcomes[2].result["digest"]
    assert outcomes[0].result["world"] == (0, 2)


def mapped(plan: Plan) -> tuple[int, int]:
    """Pieces of memory that are mapped here with all ranks, and in the end, if nothing collects circles."""
    counts: list[int] = []
    zero_grad = torch.optim.SGD.zero_grad

    def count(*arguments: Any) -> None:
        zero_grad(*arguments)
        with open("/proc/self/maps") as file:
            counts.append(sum("memfd:pycomm" in line for line in file))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.SGD, "zero_grad", count)
            train(plan)
    finally:
        gc.enable()
    return counts[2], counts[-1]


@pytest.mark.parametrize("method", ["dense", "topk"])
def test_the_memory_of_the_old_world_is_released_at_once(new_ranks: Pools, method: str) -> None:
    plan = Plan(method=method, faults={(1, 4): "die", (2, 6): "die"})
    outcomes = new_ranks(4).outcomes(mapped, plan, timeout=TIMEOUT)
    for rank in (0, 3):
        assert outcomes[rank].error is None, outcomes[rank].trace
        before, after = outcomes[rank].result
        assert after < before


@pytest.mark.behavior(
    "Lost, late and unreachable ranks", "`... ranks are left, fewer than min_ranks=...`", "The training ends."
)
def test_too_few_are_left(new_ranks: Pools) -> None:
    plan = Plan(faults={(0, 3): "die", (2, 6): "die"}, options={"min_ranks": 3})
    outcomes = new_ranks(4).outcomes(train, plan, timeout=TIMEOUT)
    errors = [outcomes[rank].error for rank in (1, 3)]
    assert all(isinstance(error, CommError) for error in errors)
    texts = {str(error).partition(": ")[2] for error in errors}
    assert texts == {"recover: 2 ranks are left, fewer than min_ranks=3: rank 2 died"}
