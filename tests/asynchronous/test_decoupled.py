"""``decoupled_sgd``: ranks of different speed that meet one by one."""

from __future__ import annotations

import re
import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import CommError
from pycomm.training.asynchronous.core import Core
from tests.asynchronous.averaged import flat
from tests.asynchronous.runs import loss_of, model_of
from tests.on_ranks import Pools, on_ranks
from tests.survival.training import die

TIMEOUT = 110.0
WAYS: dict[str, dict[str, Any]] = {
    "delayed": {"outer": pycomm.DelayedNesterov(0.7, 0.9)},
    "delayed, active": {"outer": pycomm.DelayedNesterov(0.7, 0.8, buffer=2, activation=0.25)},
    "quorum": {"outer": pycomm.Nesterov(0.7, 0.9), "quorum": 2},
    "delayed, compressed": {"outer": pycomm.DelayedNesterov(0.7, 0.9), "compression": pycomm.TopK(0.2)},
}


def test_delayed_nesterov_is_the_papers_algorithm() -> None:
    settings, size = pycomm.DelayedNesterov(0.7, 0.9, buffer=3, activation=0.2), 5
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(size, dtype=torch.float64))
    optimizer = settings.optimizer([p], num_ranks=7)
    theta, velocity, total = p.detach().clone(), torch.zeros(size).double(), torch.zeros(size).double()
    for t in range(10):
        g = torch.randn(size, dtype=torch.float64)
        total = total + g
        if (t + 1) % 3 == 0:
            velocity = 0.9 * velocity + total / 3
            theta = theta - 0.7 * ((1 - 0.2 * 3 + 0.2) * 0.9 * velocity + g / 3)
            total = torch.zeros_like(total)
        else:
            theta = theta - 0.7 * (0.2 * 0.9 * velocity + g / 3)
        p.grad = g
        optimizer.step()
        torch.testing.assert_close(p.detach(), theta, rtol=1e-14, atol=1e-14)
    mistakes = {"lr": 0.0}, {"momentum": 1.0}, {"buffer": 0}, {"buffer": 4, "activation": 0.3}, {"activation": -0.1}
    for wrong in mistakes:
        with pytest.raises(ValueError, match=list(wrong)[-1]):
            pycomm.DelayedNesterov(**wrong)


class Restated:
    """What merges make of contributions, in float64."""

    def __init__(self, start: torch.Tensor, way: str, size: int) -> None:
        options = WAYS[way]
        self.center, self._outer, self._quorum = start.clone(), options["outer"], options.get("quorum")
        self._velocity, self._total = torch.zeros_like(start), torch.zeros_like(start)
        self._size, self._count = size, 0
        self._collected: list[tuple[float, torch.Tensor]] = []
        self._method, self._left = options.get("compression"), torch.zeros(size, len(start), dtype=torch.float64)

    def sent(self, rank: int, moved: torch.Tensor) -> torch.Tensor:
        """Return what arrives: of each matrix the largest entries, and what was left of them before."""
        if self._method is None:
            return moved
        left, sent, begin = self._left[rank], torch.zeros_like(moved), 0
        left += moved
        for p in model_of().parameters():
            inside, begin = slice(begin, begin + p.numel()), begin + p.numel()
            count = max(1, round(self._method.ratio * p.numel())) if p.dim() > 1 else p.numel()
            chosen = left[inside].abs().topk(count).indices + inside.start
            sent[chosen], left[chosen] = left[chosen], 0.0
        return sent

    def push(self, rank: int, moved: torch.Tensor, samples: float) -> None:
        outer, moved = self._outer, self.sent(rank, moved)
        if self._quorum is not None:
            self._collected.append((samples, moved))
            return
        n, c = outer.buffer or self._size, outer.activation
        self._count += 1
        self._total = self._total + moved
        share = c
        if self._count % n == 0:
            self._velocity, self._total = outer.momentum * self._velocity + self._total / n, 0 * self._total
            share = 1 - c * n + c
        self.center = self.center - outer.lr * (moved / n + share * outer.momentum * self._velocity)

    def merge(self) -> None:
        weights = sum(samples for samples, _ in self._collected)
        mean = torch.stack([samples * moved for samples, moved in self._collected]).sum(0) / weights
        self._collected = []
        self._velocity = self._outer.momentum * self._velocity + mean
        self.center = self.center - self._outer.lr * (mean + self._outer.momentum * self._velocity)


def train(way: str, steps: int, pause: float, slow: int = -1, dies: int = -1) -> dict[str, Any]:
    """Train, the rank ``slow`` four times as slowly; rank 0 tells in which order contributions came and were merged."""
    rank, model, events = dist.get_rank(), model_of(), list[tuple[Any, ...]]()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            record(patch, events)
        else:
            next(model.parameters()).data.zero_()  # rank 0's is taken
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        handle = pycomm.decoupled_sgd(optimizer, model, every=8, timeout=60, **WAYS[way])
        handle.set_weight(rank + 1)
        meetings = []
        for step in range(steps // 4 if rank == slow else steps):
            if rank == dies and step == 10:
                die()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            time.sleep(pause * (4 if rank == slow else 1))
            met = handle.stats()["meetings"]
            optimizer.step()
            if handle.stats()["meetings"] > met:
                meetings.append(step)
        stats = handle.stats()
        state = handle.state_dict() if rank == 0 else {}
        handle.detach()
    return {"events": events, "meetings": meetings, "stats": stats, "state": state, "end": flat(model)}


def record(patch: pytest.MonkeyPatch, events: list[tuple[Any, ...]]) -> None:
    pull, push, update = Core.pull, Core.push, Core.update_if_due

    def pulling(self: Core, worker: int) -> int:
        events.append(("pull", worker))
        return pull(self, worker)

    def pushing(self: Core, worker: int, number: int, samples: float, gradient: torch.Tensor) -> None:
        events.append(("push", worker, samples))
        push(self, worker, number, samples, gradient)

    def updating(self: Core) -> bool:
        was_due = update(self)
        if was_due:
            events.append(("merge",))
        return was_due

    patch.setattr(Core, "pull", pulling)
    patch.setattr(Core, "push", pushing)
    patch.setattr(Core, "update_if_due", updating)


def replay(way: str, size: int, told: list[dict[str, Any]]) -> Restated:
    """Let the events happen again in one process; the last parameters of all must be as they were."""
    start = model_of()
    restated = Restated(flat(start), way, size)
    models = {rank: model_of() for rank in range(size)}
    optimizers = {rank: torch.optim.Adam(model.parameters(), 0.02) for rank, model in models.items()}
    steps, anchors = dict.fromkeys(models, 0), dict.fromkeys(models, restated.center)
    meetings = {rank: iter(each["meetings"]) for rank, each in enumerate(told) if each}

    def go(rank: int, until: int) -> float:
        """Step up to that one; return the number of steps."""
        begun = steps[rank]
        for step in range(begun, until + 1):
            optimizers[rank].zero_grad()
            loss_of(models[rank], rank, step).backward()
            optimizers[rank].step()
        steps[rank] = until + 1
        return steps[rank] - begun

    for kind, *rest in told[0]["events"]:
        if kind == "merge":
            if "quorum" in WAYS[way]:
                restated.merge()
            continue
        rank = rest[0]
        if rank not in meetings:
            return restated  # what a rank did that is lost is not known
        if kind == "push":
            made = go(rank, next(meetings[rank]))
            assert rest[1] == made * (rank + 1)
            restated.push(rank, anchors[rank] - flat(models[rank]), rest[1])
        else:
            anchors[rank] = restated.center
            torch.nn.utils.vector_to_parameters(restated.center.clone(), models[rank].parameters())
    for rank, each in enumerate(told):
        go(rank, len_of(each) - 1)
        torch.testing.assert_close(each["end"], flat(models[rank]), rtol=1e-10, atol=1e-10)
    return restated


def len_of(told: dict[str, Any]) -> int:
    return int(told["stats"]["steps"])


@pytest.mark.parametrize("way", WAYS)
def test_it_is_what_one_process_makes_of_the_same_order(rank_pools: Pools, way: str) -> None:
    outcomes = rank_pools(3).outcomes(train, way, 40, 0.002, 2, timeout=TIMEOUT)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    told = [outcome.result for outcome in outcomes]
    restated = replay(way, 3, told)
    pushes = sum(len(each["meetings"]) for each in told)
    merges = sum(event == ("merge",) for event in told[0]["events"])
    assert merges == pushes if way != "quorum" else pushes / 3 <= merges <= pushes
    # Rank 0 may have read its state before the last contributions of the others came.
    if all(event[1] == 0 for event in told[0]["events"][-2:] if event[0] != "merge"):
        torch.testing.assert_close(told[0]["state"]["center"]["memory"], restated.center, rtol=1e-10, atol=1e-10)


def test_a_slow_rank_meets_after_fewer_steps(rank_pools: Pools) -> None:
    outcomes = rank_pools(3).outcomes(train, "delayed", 64, 0.01, 2, timeout=TIMEOUT)
    told = [outcome.result for outcome in outcomes]
    first, second = told[2]["meetings"][:2]
    assert first == 7  # nothing is known of its speed before
    assert second - first < 8  # 2, but for a machine that is busy
    assert told[0]["stats"]["every"] > told[2]["stats"]["every"]


@pytest.mark.parametrize("way", ["delayed", "quorum"])
def test_a_rank_that_dies_harms_nobody(new_ranks: Pools, way: str) -> None:
    outcomes = new_ranks(3).outcomes(train, way, 40, 0.002, -1, 1, timeout=TIMEOUT)
    assert isinstance(outcomes[1].error, ChildProcessError)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        assert len(outcomes[rank].result["meetings"]) >= 4


def test_without_rank_0_there_is_an_error(new_ranks: Pools) -> None:
    outcomes = new_ranks(2).outcomes(train, "delayed", 40, 0.002, -1, 0, timeout=TIMEOUT)
    assert isinstance(outcomes[1].error, CommError), outcomes[1].trace


def drift(options: dict[str, Any], skips: bool) -> list[str]:
    """Train with a schedule, rank 1 more slowly; return the errors of a step with another rate, and after it."""
    rank, model, errors = dist.get_rank(), model_of(), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    handle = pycomm.decoupled_sgd(optimizer, model, every=4, timeout=30, **options)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, rank, number).backward()
        time.sleep(0.01 * rank)
        optimizer.step()
        schedule.step()

    for number in range(6 + 4 * (1 - rank)):  # after steps of the same number the rates are the same
        step(number)
    dist.barrier()
    if skips:
        handle.skip_step()
    if rank == 1:
        optimizer.param_groups[0]["lr"] *= 2
    for number in range(4):
        try:
            step(number)
            handle.meet()
        except ValueError as error:
            errors.append(str(error))
    dist.barrier()
    try:
        handle.take_center()
    except ValueError as error:
        errors.append(str(error))
    dist.barrier()
    handle.detach()
    return errors


def test_other_rates_after_equal_steps_are_an_error_of_all(rank_pools: Pools) -> None:
    says = "'lr' of parameter group 0 is .* on rank 0, .* on rank 1.*per_rank.*of each"
    for errors in rank_pools(2).run(drift, {}, False, timeout=TIMEOUT):
        assert errors
        assert all(re.search(says, error) for error in errors), errors


@pytest.mark.parametrize(("options", "skips"), [({"per_rank": ("lr",)}, False), ({}, True)], ids=["own", "skipped"])
def test_rates_that_may_differ(rank_pools: Pools, options: dict[str, Any], skips: bool) -> None:
    assert rank_pools(2).run(drift, options, skips, timeout=TIMEOUT) == [[], []]


@on_ranks(2, timeout=TIMEOUT)
def test_it_goes_on_from_its_state() -> None:
    """With ranks that take turns, so that the order is the same."""
    rank, ends = dist.get_rank(), []
    for interrupted in (False, True):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        options: dict[str, Any] = {"every": 2, "timeout": 60, "outer": pycomm.DelayedNesterov(0.5, 0.9)}
        handle = pycomm.decoupled_sgd(optimizer, model, **options)
        for step in range(12):
            if interrupted and step == 7:
                state, weights = handle.state_dict(), model.state_dict()
                dist.barrier()
                handle.detach()
                model = model_of()
                optimizer = torch.optim.SGD(model.parameters(), 0.05)
                handle = pycomm.decoupled_sgd(optimizer, model, **options)
                dist.barrier()
                handle.load_state_dict(state)
                model.load_state_dict(weights)
                with pytest.raises(ValueError, match="not a DecoupledAverager"):
                    handle.load_state_dict({})
                if rank == 1:
                    with pytest.raises(ValueError, match="of another rank"):
                        handle.load_state_dict({**state, "center": {}})
                dist.barrier()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for turn in range(2):
                if turn == rank:
                    handle._planned = 2  # type: ignore[attr-defined]  # whatever their speed
                    optimizer.step()
                dist.barrier()
        dist.barrier()
        handle.take_center()
        ends.append(flat(model))
        dist.barrier()
        handle.detach()
        handle.detach()
        with pytest.raises(RuntimeError, match="is detached"):
            handle.meet()
    assert torch.equal(ends[0], ends[1])


def make(options: dict[str, Any]) -> None:
    model = model_of()
    if dist.get_rank() == 1:
        options |= options.pop("other", {})
    options.pop("other", None)
    pycomm.decoupled_sgd(
        torch.optim.SGD(model.parameters(), 0.1), model, timeout=60, **{"every": 4, **options}
    ).detach()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quorum": 3, "outer": pycomm.Nesterov()}, "quorum=3 of 2 ranks"),
        ({"quorum": 0, "outer": pycomm.Nesterov()}, "quorum"),
        ({"outer": pycomm.Nesterov()}, "wanted None or a pycomm.DelayedNesterov, or a quorum"),
        ({"outer": "nesterov"}, "outer is 'nesterov'"),
        ({"quorum": 1, "outer": pycomm.DelayedNesterov()}, "merges by a pycomm.Nesterov"),
        ({"every": 0}, "every"),
        ({"other": {"every": 5}}, "the ranks disagree: 'every=5'"),
    ],
)
def test_mistakes_are_told_to_all(rank_pools: Pools, options: dict[str, Any], problem: str) -> None:
    for outcome in rank_pools(2).outcomes(make, options, timeout=TIMEOUT):
        assert isinstance(outcome.error, (ValueError, TypeError)), outcome.trace
        assert problem in str(outcome.error)


OLD: list[tuple[dict[str, Any], str]] = [
    ({"outer": pycomm.DelayedNesterov(0.5), "process_group": None}, "every=4, outer=pycomm.DelayedNesterov(lr=0.5))"),
    ({"outer": pycomm.Nesterov(0.5), "quorum": 1}, "every=4, outer=pycomm.Nesterov(lr=0.5), quorum=1)"),
]


@on_ranks(2)
def test_local_sgd_with_what_is_of_decoupled_ranks_goes_on_working() -> None:
    model, call = model_of(), cast(Any, pycomm.local_sgd)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for options, line in OLD:
        with pytest.warns(
            DeprecationWarning, match=re.escape(f"pycomm.decoupled_sgd(..., timeout=60, {line}")
        ) as caught:
            handle = call(optimizer, model, timeout=60, every=4, **options)
        assert len(caught) == 1
        assert repr(handle).startswith("DecoupledAverager(")
        dist.barrier()
        handle.detach()
    with pytest.warns(DeprecationWarning, match=r"quorum= of .* write pycomm.local_sgd\(..., every=4, outer=None\)$"):
        call(optimizer, model, every=4, quorum=None).detach()
    for options in ({"quorum": 1, "delay": 1}, {"outer": pycomm.DelayedNesterov(), "on_failure": "shrink"}):
        with pytest.raises(ValueError, match="does not go with ranks that meet one by one"):
            call(optimizer, model, timeout=60, every=4, **options)
