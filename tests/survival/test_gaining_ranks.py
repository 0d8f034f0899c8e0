"""``attach(join=...)``: processes that come later become ranks like the others."""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import CommError
from pycomm.training.reducer import members
from tests.hosts import on_hosts
from tests.on_ranks import Pools
from tests.ranks import RankOutcome
from tests.reducer.attaching import grouped
from tests.survival.training import METHODS, Plan, batch, die, digest, expected, small_model

TIMEOUT = 50.0
AFTERWARDS = 8  # steps that all ranks take together once the last newcomer has come


def attach(plan: Plan, model: nn.Module, *, join: str | None = None) -> tuple[pycomm.Reducer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.0 if plan.method == "dgc" else 0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    options = {"timeout": 30, "check_replicas": 3, "bucket_mb": 0.004, "carry": {"scheduler": scheduler}}
    given = grouped(**{**options, **plan.options}, compression=METHODS[plan.method], accumulate=plan.accumulate)
    attach = pycomm.attach if join is None else functools.partial(pycomm.join, join)
    reducer = attach(optimizer, model, **given)
    return reducer, scheduler


def go_on(plan: Plan, reducer: pycomm.Reducer, scheduler: Any, model: nn.Module, size: int) -> dict[str, Any]:
    """Train until the world has had ``size`` ranks, and ``AFTERWARDS`` steps more."""
    number, first = reducer._engine.members.survival.membership.me, reducer.stats()["steps"]  # type: ignore[attr-defined]
    worlds: list[tuple[int, ...]] = []
    step, left, begun = first, AFTERWARDS, time.monotonic()
    while left > 0:
        assert time.monotonic() - begun < 30.0, "nobody came"
        reducer.optimizer.zero_grad()
        for part in range(plan.accumulate):
            x, y = batch(number, step, part)
            if plan.weighted:
                reducer.set_weight(len(x))
            loss = nn.functional.mse_loss(model(x), y)
            (loss if plan.weighted else loss / plan.accumulate).backward()
        reducer.optimizer.step()
        scheduler.step()
        worlds.append(reducer.world)
        step += 1
        complete = len(reducer.world) >= size and any(rank >= plan.founders for rank in reducer.world)
        left = left - 1 if complete else AFTERWARDS
        time.sleep(0.002)
    told = {
        "digest": digest(model),
        "parameters": [p.detach().clone() for p in model.parameters()],
        "worlds": worlds,
        "steps": step,
        "joins": reducer.stats()["joins"],
        "rates": scheduler.get_last_lr(),
        "momenta": [entry["momentum_buffer"].sum().item() for entry in reducer.optimizer.state.values() if entry],
    }
    reducer.detach()
    return told


def stay(plan: Plan, size: int) -> dict[str, Any]:
    with on_hosts(plan.hosts) if plan.hosts else contextlib.nullcontext():
        model = small_model()
        reducer, scheduler = attach(plan, model)
        return go_on(plan, reducer, scheduler, model, size)


def come(plan: Plan, size: int, port: int, delay: float = 0.3) -> dict[str, Any]:
    time.sleep(delay)
    with on_hosts(plan.hosts) if plan.hosts else contextlib.nullcontext():
        torch.manual_seed(99)
        model = small_model()
        for p in model.parameters():
            p.data.normal_()  # not theirs
        reducer, scheduler = attach(plan, model, join=f"127.0.0.1:{port}")
        return go_on(plan, reducer, scheduler, model, size)


def together(pools: Pools, size: int, plan: Plan, *guests: tuple[Callable[..., Any], Plan]) -> list[list[RankOutcome]]:
    """The outcomes of ``size`` ranks, and of each guest."""
    members = pools(size)
    wanted = size + sum(function in (come, come_later) for function, _ in guests)
    plan = replace(plan, founders=size)
    with ThreadPoolExecutor() as threads:
        works = [threads.submit(members.outcomes, stay, plan, wanted, timeout=TIMEOUT)]
        for function, its_plan in guests:
            works.append(
                threads.submit(
                    pools(1).outcomes, function, replace(its_plan, founders=size), wanted, members.port, timeout=TIMEOUT
                )
            )
        return [work.result() for work in works]


def equal_to_the_bit(outcomes: list[list[RankOutcome]]) -> list[dict[str, Any]]:
    for group in outcomes:
        for outcome in group:
            assert outcome.error is None, outcome.trace
    told = [outcome.result for group in outcomes for outcome in group]
    assert len({each["digest"] for each in told}) == 1
    assert len({each["steps"] for each in told}) == 1
    assert len({str(each["rates"]) for each in told}) == 1, "the schedule was not carried over"
    assert len({str(each["momenta"]) for each in told}) == 1
    return told


@pytest.mark.parametrize("variant", ["plain", "accumulated", "weighted"])
def test_a_newcomer_has_weight_zero_first(new_ranks: Pools, variant: str) -> None:
    plan = Plan(accumulate=1 if variant == "plain" else 2, weighted=variant == "weighted")
    told = equal_to_the_bit(together(new_ranks, 2, plan, (come, plan)))
    (join,) = told[0]["joins"]
    assert join["rank"] == 2
    assert join["world"] == (0, 1, 2)
    # In the step of its arrival the averages are those of the others.
    worlds: list[tuple[int, ...]] = [(0, 1)] * (join["step"] + 1)
    worlds += [(0, 1, 2)] * (told[0]["steps"] - join["step"] - 1)
    wanted = expected(replace(plan, steps=told[0]["steps"]), worlds, rate=lambda step: 0.05 * 0.9 ** (step // 5))
    for mine, right in zip(told[2]["parameters"], wanted, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["topk", *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS)])
def test_every_kind_of_method(new_ranks: Pools, method: str) -> None:
    equal_to_the_bit(together(new_ranks, 2, Plan(method=method), (come, Plan(method=method))))


def test_several_come_to_one(new_ranks: Pools) -> None:
    told = equal_to_the_bit(together(new_ranks, 1, Plan(), (come, Plan()), (come, Plan())))
    assert told[0]["worlds"][-1] == (0, 1, 2)


@pytest.mark.parametrize("theirs", [*(pytest.param(each, marks=pytest.mark.slow) for each in "ab"), "c"])
def test_on_another_host(new_ranks: Pools, theirs: str) -> None:
    told = equal_to_the_bit(together(new_ranks, 3, Plan(hosts="aab"), (come, Plan(hosts=theirs))))
    assert told[-1]["worlds"][-1] == (0, 1, 2, 3)


def come_and_die(plan: Plan, size: int, port: int) -> None:
    """At the moment that ``plan.options`` names; as a newcomer that others must not wait for."""
    moment = plan.options["moment"]
    with pytest.MonkeyPatch.context() as patch:
        if moment == "meeting":
            patch.setattr(importlib.import_module("pycomm.training.reducer.join"), "communicator_at", lambda *_: die())
        elif moment == "state":
            patch.setattr(
                importlib.import_module("pycomm.training.reducer.join"), "share_state", lambda *_, **__: die()
            )
        elif moment == "hashes":
            patch.setattr(members, "_compare", lambda *_: die())
        model = small_model()
        attach(replace(plan, options={}), model, join=f"127.0.0.1:{port}")
        next(iter(model.parameters())).register_hook(lambda _: die())
        nn.functional.mse_loss(model(batch(0, 0)[0]), batch(0, 0)[1]).backward()


@pytest.mark.parametrize(
    "moment",
    ["state", "its first pass", *(pytest.param(each, marks=pytest.mark.slow) for each in ("meeting", "hashes"))],
)
def test_one_that_dies_as_it_comes_harms_nobody(new_ranks: Pools, moment: str) -> None:
    plan = Plan(method="topk", options={"moment": moment})
    members, lost, late = together(
        new_ranks, 2, Plan(method="topk"), (come_and_die, plan), (come_later, Plan(method="topk"))
    )
    assert isinstance(lost[0].error, ChildProcessError)
    told = equal_to_the_bit([members, late])
    assert told[0]["worlds"][-1] == told[2]["worlds"][-1]
    assert len(told[0]["worlds"][-1]) == 3


def come_later(plan: Plan, size: int, port: int) -> dict[str, Any]:
    return come(plan, 3, port, delay=1.5)


def lose_a_rank_meanwhile(plan: Plan, size: int) -> dict[str, Any]:
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(members, "share_state", lambda *_, **__: die())
            return stay(plan, size)
    return stay(plan, size)


def test_a_rank_that_is_lost_as_one_comes(new_ranks: Pools) -> None:
    """The newcomer asks again."""
    members = new_ranks(3)
    with ThreadPoolExecutor() as threads:
        theirs = threads.submit(members.outcomes, lose_a_rank_meanwhile, Plan(founders=3), 3, timeout=TIMEOUT)
        its = threads.submit(new_ranks(1).outcomes, come, Plan(founders=3), 3, members.port, timeout=TIMEOUT)
        outcomes = theirs.result()
        told = equal_to_the_bit([[outcomes[0], outcomes[2]], its.result()])
    assert told[0]["worlds"][-1] == told[2]["worlds"][-1]
    assert 1 not in told[0]["worlds"][-1]


def overwrite_request(plan: Plan, size: int) -> dict[str, Any]:
    """Overwrite the newcomer's request once it is announced, as whoever reaches the store can."""
    let_in = members.Survival.let_in

    def after_a_stranger(self: members.Survival, engine: Any) -> Any:
        self._listener._store.set(f"request/{self.invited}", "garbage")
        return let_in(self, engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(members.Survival, "let_in", after_a_stranger)
        return stay(plan, size)


def test_a_request_that_is_overwritten_after_the_check_changes_nothing(new_ranks: Pools) -> None:
    members, plan = new_ranks(2), Plan(founders=2)
    with ThreadPoolExecutor() as threads:
        theirs = threads.submit(members.outcomes, overwrite_request, plan, 3, timeout=TIMEOUT)
        its = threads.submit(new_ranks(1).outcomes, come, plan, 3, members.port, timeout=TIMEOUT)
        told = equal_to_the_bit([theirs.result(), its.result()])
    assert told[0]["worlds"][-1] == (0, 1, 2)


# What does not fit.


def other(plan: Plan, size: int, port: int) -> None:
    """A newcomer that differs as ``plan.options`` says."""
    what = plan.options["differs"]
    with pytest.MonkeyPatch.context() as patch:
        if what == "version":
            patch.setattr(members, "version", lambda: "0.0.1")
        model = nn.Sequential(*small_model(), nn.Linear(5, 5)) if what == "model" else small_model()
        kind = torch.optim.AdamW if what == "optimizer" else torch.optim.SGD
        params = list(model.parameters())
        optimizer = kind(params[::-1] if what == "order" else params, lr=0.05)
        pycomm.join(
            f"127.0.0.1:{port}",
            optimizer,
            model,
            survive=pycomm.Survive(carry={"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}),
            tuning=pycomm.Tuning(bucket_mb=0.004 if what != "setting" else 25, check_replicas=3),
        )


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ("version", "the version of pycomm is '0.0.1' here"),
        ("model", "a parameter is '5.weight: [5, 5] torch.float32' here"),
        ("optimizer", "the optimizer is 'AdamW' here, 'SGD' on the ranks"),
        ("order", "the order of the optimizer's parameters is '4.bias' here, '0.weight' on the ranks"),
        (
            "setting",
            "a setting is 'tuning=Tuning(bucket_mb=25.0, check_replicas=3)' here, 'tuning=Tuning(",
        ),
    ],
)
def test_one_that_does_not_fit_is_refused_and_the_others_go_on(new_ranks: Pools, differs: str, says: str) -> None:
    members, refused, late = together(
        new_ranks, 2, Plan(), (other, Plan(options={"differs": differs})), (come_later, Plan())
    )
    assert isinstance(refused[0].error, ValueError)
    assert f"refused this process: {says}" in str(refused[0].error)
    told = equal_to_the_bit([members, late])
    assert [join["rank"] for join in told[0]["joins"]] == [2]


def ask_in_vain(address: str) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pycomm.join(address, optimizer, model, tuning=pycomm.Tuning(timeout=1.0))


def test_nobody_to_join(new_ranks: Pools) -> None:
    ranks = new_ranks(1)
    for address in ("nowhere", "host:", ":80", "127.0.0.1:port"):
        (outcome,) = ranks.outcomes(ask_in_vain, address)
        assert isinstance(outcome.error, ValueError)
        assert "wanted the address of the process group's store" in str(outcome.error)
    (outcome,) = ranks.outcomes(ask_in_vain, "127.0.0.1:1")
    assert isinstance(outcome.error, CommError)
    assert "no store listens at 127.0.0.1:1" in str(outcome.error)
    (outcome,) = ranks.outcomes(ask_in_vain, f"127.0.0.1:{ranks.port}")
    assert isinstance(outcome.error, CommError)
    assert "did not answer" in str(outcome.error)
