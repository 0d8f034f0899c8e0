"""``attach(backup=b)``: steps that go on without the slowest ranks, whose gradients come with their next step."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.reducer.backup import BackupPolicy, StandbyJob
from tests.hosts import on_hosts
from tests.on_ranks import Pools
from tests.reducer.attaching import grouped
from tests.survival.training import METHODS, die, digest, loss_of, small_model

TIMEOUT = 100.0
SIZE = 4


@dataclass
class Late:
    """A run in which ranks wait in some steps until the others have ended them, which wait for nobody then.

    ``where[(rank, step)]``: "forward", or in "backward", when part of the gradients are on their way. A rank that dies
    does so in a hook of backward.
    """

    where: Mapping[tuple[int, int], str]
    method: str = "dense"
    steps: int = 10
    backup: int = 1
    set_to_none: bool = True
    hosts: str = ""
    freezes: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def wait_for_the_others(folder: Path, step: int, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not list(folder.glob(f"ended-{step}-*")):
        assert time.monotonic() < deadline, "the others have waited for this rank"
        time.sleep(0.002)


class Records:
    """What a rank computes itself, and the averages that it gets, added up over all steps."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self._params = params
        self.own = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        self.averages = [torch.zeros_like(p, dtype=torch.float64) for p in params]
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i, p in enumerate(params):
            if p.requires_grad:
                self.listen(i)

    def listen(self, i: int) -> None:
        self._params[i].register_hook(lambda grad: (self.own[i].add_(grad), None)[1])

    def thaw(self) -> None:
        for i, p in enumerate(self._params):
            if not p.requires_grad:
                p.requires_grad_(True)
                self.listen(i)

    def note_averages(self) -> None:
        for p, total in zip(self._params, self.averages, strict=True):
            if p.grad is not None:
                total += p.grad
        grad = self._params[-1].grad
        assert grad is not None
        self._kept.append((grad, grad.clone()))

    def are_kept(self) -> bool:
        """Whether gradients that a user has kept are what they were."""
        return all(torch.equal(mine, then) for mine, then in self._kept)


def train(run: Late, folder: str) -> dict[str, Any]:
    model = small_model()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, 0.05)
    for p in params[2:4] if run.freezes else []:
        p.requires_grad_(False)
    with on_hosts(run.hosts or "a" * SIZE):
        reducer = pycomm.attach(
            optimizer,
            model,
            compression=METHODS[run.method],
            **grouped(backup=run.backup, **{"check_replicas": 4, "timeout": 30, "bucket_mb": 0.004, **run.options}),
        )
        records = Records(params)
        for step in range(run.steps):
            if step == run.steps // 2:
                records.thaw()
            take_step(run, step, Path(folder), optimizer, model)
            records.note_averages()
            optimizer.step()
        told = {
            "own": records.own,
            "averages": records.averages,
            "state": reducer.state_dict(),
            "late": reducer.stats()["late"],
            "world": reducer.world,
            "digest": digest(model),
        }
        assert not run.set_to_none or records.are_kept()
        reducer.detach()
    return told


def take_step(run: Late, step: int, folder: Path, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    rank, first = dist.get_rank(), next(iter(model.parameters()))
    where = run.where.get((rank, step))
    optimizer.zero_grad(run.set_to_none)
    if where == "forward":
        wait_for_the_others(folder, step)
    loss = loss_of(model, rank, step)
    handle = None
    if where == "backward":
        handle = first.register_hook(lambda _: wait_for_the_others(folder, step))
    elif where == "die":
        handle = first.register_hook(lambda _: die())
    loss.backward()
    if handle is not None:
        handle.remove()
    (folder / f"ended-{step}-{rank}").touch()


def conserves(told: list[dict[str, Any]], carries: tuple[str, ...] = ("late",)) -> None:
    """All that the ranks have computed is in the averages, or is still carried."""
    names = [name for name, _ in small_model().named_parameters()]
    for i, name in enumerate(names):
        computed = sum(each["own"][i] for each in told) / len(told)
        carried = sum(
            content[name][key].double()
            for each in told
            for content in each["state"]["ranks"].values()
            for key in carries
            if key in content[name]
        )
        torch.testing.assert_close(told[0]["averages"][i] + carried, computed, rtol=1e-4, atol=1e-5)


ONE_LATE = {(3, 2): "forward", (1, 3): "backward", (3, 6): "backward", (2, 7): "forward", (2, 9): "forward"}


@pytest.mark.parametrize(
    ("run", "carries"),
    [
        (Late(ONE_LATE), ("late",)),
        (Late(ONE_LATE, set_to_none=False), ("late",)),
        (Late(ONE_LATE, "topk"), ("late", "residual")),
        (Late(ONE_LATE, "int8"), ("late", "residual")),
        (Late({(3, 2): "forward", (1, 2): "backward", (3, 3): "forward", (0, 6): "forward"}, backup=2), ("late",)),
        (Late(ONE_LATE, freezes=True), ("late",)),
        (Late({(3, 2): "forward", (1, 6): "backward"}, hosts="aabb", options={"timeout": 40}), ("late",)),
    ],
    ids=["one", "in place", "topk", "int8", "two", "thawed", "two hosts"],
)
def test_the_others_do_not_wait_and_nothing_is_lost(
    new_ranks: Pools, run: Late, carries: tuple[str, ...], tmp_path: Path
) -> None:
    told = [each.result for each in new_ranks(SIZE).outcomes(train, run, str(tmp_path), timeout=TIMEOUT)]
    assert len({each["digest"] for each in told}) == 1
    for rank, each in enumerate(told):
        assert each["late"] >= sum(late == rank for late, _ in run.where)
    conserves(told, carries)
    # The last step's late gradient is carried on, others have been sent.
    if (2, 9) in run.where:
        assert any(bool(entry["late"].any()) for entry in told[2]["state"]["ranks"]["2"].values())


def test_methods_with_velocities_and_factors_go_on(new_ranks: Pools, tmp_path: Path) -> None:
    for method in ("dgc", "powersgd"):
        folder = tmp_path / method
        folder.mkdir()
        outcomes = new_ranks(SIZE).outcomes(train, Late(ONE_LATE, method), str(folder), timeout=TIMEOUT)
        assert len({each.result["digest"] for each in outcomes}) == 1


def test_a_rank_dies_in_a_step_that_goes_on_without_another(new_ranks: Pools, tmp_path: Path) -> None:
    run = Late({(1, 5): "die", (2, 6): "forward", (3, 7): "backward"}, steps=12, options={"check_replicas": 0})
    outcomes = new_ranks(SIZE).outcomes(train, run, str(tmp_path), timeout=TIMEOUT)
    told = [each.result for each in outcomes if each.error is None]
    assert [each["world"] for each in told] == [(0, 2, 3)] * 3
    assert len({each["digest"] for each in told}) == 1
    assert told[1]["late"] >= 1
    assert told[2]["late"] >= 1


def attach_with(options: dict[str, Any]) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"on_failure": "shrink", "backup": 1, **options}
    if options.pop("scaler", False):
        options["loss_scaler"] = pycomm.LossScaler()
    reducer = pycomm.attach(optimizer, model, **grouped(**options))
    try:
        if options["backup"] > 0:
            reducer.set_weight(3)
    finally:
        reducer.detach()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"backup": 2}, "backup=2 requires more ranks than the 2 that there are"),
        ({"backup": -1}, "backup"),
        ({"accumulate": 2}, "accumulate=2"),
        ({"clip_local_norm": 1.0}, "clip_local_norm=1.0"),
        ({"buffers": "average"}, 'buffers="average"'),
        ({"scaler": True}, "a loss_scaler"),
        ({}, "set_weight does not go with backup"),
    ],
)
def test_what_does_not_go_with_it_is_refused(rank_pools: Pools, options: dict[str, Any], problem: str) -> None:
    for outcome in rank_pools(2).outcomes(attach_with, options, timeout=TIMEOUT):
        assert isinstance(outcome.error, ValueError)
        assert problem in str(outcome.error)


def load_late(state: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reducer = pycomm.attach(optimizer, model, survive=pycomm.Survive(backup=1))
    reducer.load_state_dict(state)
    loaded = reducer.state_dict()["ranks"][str(dist.get_rank())]
    for p in model.parameters():
        p.grad = None
    (0.0 * torch.stack([p.sum() for p in model.parameters()]).sum()).backward()
    sent = {name: p.grad for name, p in model.named_parameters()}
    reducer.detach()
    return {name: torch.stack([entry["late"], sent[name]]) for name, entry in loaded.items()}  # type: ignore[list-item]


def test_late_gradients_are_saved_and_sent_by_fewer_ranks(new_ranks: Pools, tmp_path: Path) -> None:
    run = Late({(2, 9): "forward", (1, 5): "backward"})
    told = [each.result for each in new_ranks(SIZE).outcomes(train, run, str(tmp_path), timeout=TIMEOUT)]
    states = [each["state"] for each in told]
    wanted = {
        name: sum(state["ranks"][str(rank)][name]["late"] for rank, state in enumerate(states))
        for name, _ in small_model().named_parameters()
    }
    loaded = [each.result for each in new_ranks(2).outcomes(load_late, states, timeout=TIMEOUT)]
    for name, total in wanted.items():
        torch.testing.assert_close(sum(each[name][0] for each in loaded), total)
        assert bool(total.any())
        for each in loaded:  # the gradients themselves are 0
            torch.testing.assert_close(each[name][1], total)


def test_a_job_that_stands_by_ends_with_its_worker() -> None:
    """Otherwise a process that ends without detach() would wait for a step that does not come."""
    stopped = False
    standin = StandbyJob(lambda: False, lambda: None, lambda: stopped)
    stopped = True
    standin.run()
    assert standin.add(lambda: None) is None


def test_works_of_a_job_that_failed_end_nevertheless() -> None:
    def fail() -> None:
        raise OSError("no memory")

    standin = StandbyJob(lambda: True, fail, lambda: False)
    with pytest.raises(OSError, match="no memory"):
        standin.run()
    work = standin.add(lambda: 3)
    assert work is not None
    standin.end()
    assert work.wait() == 3


def train_without_end() -> int:
    """Leave without detach(), while a job stands by."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    reducer = pycomm.attach(optimizer, model, survive=pycomm.Survive(backup=1))
    for step in range(4):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.ones(1, 20)), torch.full((1, 5), float(step))).backward()
        optimizer.step()
    assert isinstance(reducer._engine.policy, BackupPolicy)
    assert reducer._engine.policy._standby is not None
    return os.getpid()


def test_ranks_end_while_a_job_stands_by(new_ranks: Pools) -> None:
    assert len({each.result for each in new_ranks(2).outcomes(train_without_end, timeout=TIMEOUT)}) == 2
