"""Deaths at the moments that matter: around the commit of a step, and while those that are left meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import CommError, Communicator
from pycomm.training.elastic import membership
from pycomm.training.reducer import members
from tests.on_ranks import Pools
from tests.survival.training import METHODS, Plan, batch, die, expected, small_model, train

TIMEOUT = 50.0
DEATH = 5  # the step


def at_commit(moment: str, plan: Plan) -> dict[str, Any]:
    """Rank 2 dies around its commit of a step. "half": rank 1 does not learn that the commit has ended, rank 0 does."""
    original = members.Survival.commit
    calls = 0

    def commit(self: members.Survival, *arguments: int) -> None:
        nonlocal calls
        step, rank = calls, dist.get_rank()
        calls += 1
        if step == DEATH and rank == 2 and moment == "before":
            die()
        original(self, *arguments)
        if step == DEATH and rank == 2:
            die()
        if step == DEATH and rank == 1 and moment == "half":
            raise CommError.during("barrier", "rank 2 died", rank=1, peer=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members.Survival, "commit", commit)
        return train(plan)


@pytest.mark.parametrize(
    "method", ["dense", *(pytest.param(each, marks=pytest.mark.slow) for each in ("topk", "powersgd"))]
)
@pytest.mark.parametrize(("moment", "with_it"), [("before", 5), ("after", 6), ("half", 6)])
def test_a_step_is_committed_by_all_or_by_none(new_ranks: Pools, moment: str, with_it: int, method: str) -> None:
    plan = Plan(method=method)
    outcomes = new_ranks(3).outcomes(at_commit, moment, plan, timeout=TIMEOUT)
    told = [outcome.result for outcome in outcomes[:2]]
    assert told[0]["digest"] == told[1]["digest"]
    assert all(each["world"] == (0, 1) for each in told)
    if method == "dense":
        wanted = expected(plan, [(0, 1, 2)] * with_it + [(0, 1)] * (12 - with_it))
        for mine, right in zip(told[0]["parameters"], wanted, strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-6)


def in_recovery(where: str, plan: Plan) -> dict[str, Any]:
    """Rank 3 dies in a step; rank 0 while those that are left agree on that, or meet."""
    if dist.get_rank() != 0:
        return train(plan)
    with pytest.MonkeyPatch.context() as patch:
        if where == "report":
            patch.setattr(membership.Membership, "agree", lambda *_: die())
        elif where == "decision":
            patch.setattr(membership._Round, "propose", lambda _: die())
        elif where == "meeting":
            patch.setattr(Communicator, "move", lambda *_: die())
        else:
            patch.setattr(membership.Membership, "confirm", lambda *_: die())
        return train(plan)


@pytest.mark.parametrize("hosts", ["", pytest.param("aabb", marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["report", "decision", "meeting", "meeting's end"])
def test_another_one_dies_during_recovery(new_ranks: Pools, where: str, hosts: str) -> None:
    plan = Plan(faults={(3, DEATH): "die"}, hosts=hosts)
    outcomes = new_ranks(4).outcomes(in_recovery, where, plan, timeout=TIMEOUT)
    told = [outcomes[rank].result for rank in (1, 2)]
    assert told[0] is not None, outcomes[1].trace
    assert told[1] is not None, outcomes[2].trace
    assert told[0]["digest"] == told[1]["digest"]
    assert told[0]["world"] == told[1]["world"]
    assert told[0]["world"] == (1, 2) or where == "decision"  # another rank may have been first to propose


def contributions(plan: Plan) -> dict[str, Any]:
    """What this rank has contributed to the averages, what they came to, and what is left of it."""
    rank, model = dist.get_rank(), small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    reducer = pycomm.attach(
        optimizer,
        model,
        compression=METHODS[plan.method],
        survive=pycomm.Survive(),
        tuning=pycomm.Tuning(bucket_mb=0.004, timeout=30),
    )
    given = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    got = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for step in range(plan.steps):
        x, y = batch(rank, step)
        own = torch.autograd.grad(torch.nn.functional.mse_loss(model(x), y), list(model.parameters()))
        if (rank, step) in plan.faults:
            next(iter(model.parameters())).register_hook(lambda _: die())
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        for (name, p), mine in zip(model.named_parameters(), own, strict=True):
            assert p.grad is not None
            given[name] += mine.double() / len(reducer.world)
            got[name] += p.grad.double()
        optimizer.step()
    (state,) = reducer.state_dict()["ranks"].values()
    left = {name: entry["residual"].double() for name, entry in state.items() if "residual" in entry}
    reducer.detach()
    return {"given": given, "got": got, "left": left}


@pytest.mark.parametrize("method", ["topk", "powersgd", "int8"])
def test_what_is_lost_is_the_lost_ranks_residual(new_ranks: Pools, method: str) -> None:
    """All that ranks have contributed has arrived, is in residuals of those that are left, or was in the lost one's.

    That is known from the same training without the death, up to then.
    """
    before = new_ranks(3).run(contributions, Plan(method=method, steps=DEATH), timeout=TIMEOUT)
    plan = Plan(method=method, steps=12, faults={(1, DEATH): "die"})
    outcomes = new_ranks(3).outcomes(contributions, plan, timeout=TIMEOUT)
    after = [outcomes[rank].result for rank in (0, 2)]
    assert after[0]["left"], "the method keeps nothing"
    for name in after[0]["left"]:
        given = sum(each["given"][name] for each in after) + before[1]["given"][name]
        left = sum(each["left"][name] for each in after)
        lost = before[1]["left"][name]
        assert lost.abs().max() > 1e-4
        torch.testing.assert_close(after[0]["got"][name] + left + lost, given, rtol=1e-5, atol=1e-6)
