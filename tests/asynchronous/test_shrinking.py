"""``local_sgd(on_failure="shrink")``: ranks go on without others, and with new ones, as one process has it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import CommError
from pycomm.training.asynchronous.elastic_group import ElasticGroup
from pycomm.training.asynchronous.local_averager import LocalAverager
from tests.asynchronous.averaged import HALVES, Course, flat
from tests.asynchronous.runs import loss_of, model_of
from tests.hosts import on_hosts
from tests.on_ranks import Pools
from tests.survival.training import die, stop

TIMEOUT = 60.0
OUTER, ELASTIC = pycomm.Nesterov(0.7, 0.9), pycomm.Elastic(0.8)


def options_of(course: Course) -> dict[str, Any]:
    compression = None if course.top is None else pycomm.TopK(course.top)
    fragments = len(course.turns)
    options: dict[str, Any] = {"outer": course.outer, "delay": course.delay, "compression": compression}
    return {"every": course.every, "fragments": fragments, "on_failure": "shrink", "timeout": 30, **options}


def dies_in_commit(before: bool, times: int) -> Callable[[ElasticGroup], int]:
    """A commit in which this rank dies the ``times``-th time, before it has told the others, or after."""
    left, commit = [times], ElasticGroup.commit

    def dying(self: ElasticGroup) -> int:
        left[0] -= 1
        if left[0] == 0 and before:
            die()
        number = commit(self)
        if left[0] == 0:
            die()
        return number

    return dying


def lose(course: Course, moment: str, hosts: str = "") -> dict[str, Any]:
    """Train; those that are lost die at that ``moment`` of the step, or of the meeting that is the second of all."""
    with on_hosts(hosts) if hosts else contextlib.nullcontext():
        return lose_here(course, moment)


def lose_here(course: Course, moment: str) -> dict[str, Any]:
    rank, model = dist.get_rank(), model_of()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    with pytest.MonkeyPatch.context() as patch:
        if rank in course.lost and "commit" in moment:
            patch.setattr(ElasticGroup, "commit", dies_in_commit(moment == "before the commit", 2))
        handle = pycomm.local_sgd(optimizer, model, **options_of(course))
        if course.weighted:
            handle.set_weight(rank + 1)
        found = []
        for step in range(course.steps):
            if course.lost.get(rank) == step and moment in ("step", "stop"):
                die() if moment == "step" else stop()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            found.append(flat(model))
    stats, world = handle.stats(), handle.world
    handle.detach()
    return {"parameters": found, "stats": stats, "world": world}


COURSES = {
    "local SGD": Course(3, 13, lost={1: 5}),
    "rank 0": Course(3, 13, outer=OUTER, lost={0: 7}),
    "two, compressed": Course(4, 13, outer=OUTER, turns=HALVES, top=0.3, lost={1: 3, 3: 9}),
    "elastic": Course(3, 13, outer=ELASTIC, turns=HALVES, weighted=False, lost={0: 6}),
}


def agree(outcomes: list[Any], course: Course, atol: float = 1e-12) -> list[dict[str, Any]]:
    wanted, told = course.expected(), []
    for rank, outcome in enumerate(outcomes):
        if rank in course.lost:
            assert isinstance(outcome.error, ChildProcessError)
            continue
        assert outcome.error is None, outcome.trace
        told.append(outcome.result)
        for mine, right in zip(outcome.result["parameters"], wanted, strict=True):
            torch.testing.assert_close(mine, right[rank], rtol=atol, atol=atol)
        assert outcome.result["world"] == tuple(r for r in range(course.size) if r not in course.lost)
        left = {r for change in outcome.result["stats"]["changes"] for r in change["left"]}
        assert left == set(course.lost)
    return told


@pytest.mark.parametrize("name", COURSES)
def test_meetings_are_made_again_by_those_that_are_left(new_ranks: Pools, name: str) -> None:
    course = COURSES[name]
    agree(new_ranks(course.size).outcomes(lose, course, "step", timeout=TIMEOUT), course)


def test_one_that_is_stopped_is_left_behind(new_ranks: Pools) -> None:
    course = Course(3, 13, outer=OUTER, lost={1: 3})
    outcomes = new_ranks(3).outcomes(lose, course, "stop", timeout=TIMEOUT)
    assert isinstance(outcomes[1].error, CommError), outcomes[1].trace
    assert "left behind" in str(outcomes[1].error)
    outcomes[1] = replace(outcomes[1], error=ChildProcessError())
    agree(outcomes, course)


def test_on_two_hosts(new_ranks: Pools) -> None:
    course = Course(3, 13, outer=OUTER, turns=HALVES, lost={1: 6})
    agree(new_ranks(3).outcomes(lose, course, "step", "aab", timeout=TIMEOUT), course, atol=1e-10)


def test_of_the_meetings_under_way_all_count_that_began_before_one_that_does(new_ranks: Pools) -> None:
    # Those that began after steps 5 and 7 are under way.
    course = Course(3, 14, outer=OUTER, turns=HALVES, delay=3, lost={1: 8})
    outcomes = new_ranks(3).outcomes(lose, course, "step", timeout=TIMEOUT)
    fits = 0
    for last in (4, 5, 7):
        with contextlib.suppress(AssertionError):
            agree(outcomes, replace(course, missed={1: last}))
            fits += 1
    assert fits == 1


@pytest.mark.parametrize(("outer", "delay"), [(OUTER, 0), (OUTER, 3), (ELASTIC, 0)], ids=repr)
def test_one_that_dies_before_the_commit_has_not_met(new_ranks: Pools, outer: Any, delay: int) -> None:
    # The second meeting of all is that of the second half, after step 3.
    course = Course(3, 13, outer=outer, turns=HALVES, delay=delay, lost={2: 3})
    agree(new_ranks(3).outcomes(lose, course, "before the commit", timeout=TIMEOUT), course)


@pytest.mark.parametrize("outer", [OUTER, ELASTIC], ids=repr)
def test_one_that_dies_after_the_commit_has_met(new_ranks: Pools, outer: Any) -> None:
    course = Course(3, 13, outer=outer, turns=HALVES, lost={2: 4})
    agree(new_ranks(3).outcomes(lose, course, "after the commit", timeout=TIMEOUT), course)


AFTERWARDS = 24  # steps that all make together once one has come
MOST = 20_000


def go_on(course: Course, handle: LocalAverager, model: torch.nn.Module, rank: int, first: int) -> Any:
    """Train until a rank has come, and some steps more."""
    optimizer, found, come, step = handle.optimizer, {}, first if rank == course.size else None, first
    while come is None or step < come + AFTERWARDS:
        assert step < MOST, "nobody came"
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        found[step] = flat(model)
        step += 1
        if come is None and len(handle.world) > course.size:
            come = step
        time.sleep(0.002)
    world = handle.world
    handle.detach()
    return {"parameters": found, "world": world, "come": come}


def stay(course: Course) -> Any:
    model = model_of()
    handle = pycomm.local_sgd(torch.optim.Adam(model.parameters(), 0.02), model, **options_of(course))
    return go_on(course, handle, model, dist.get_rank(), 0)


def come(course: Course, port: int) -> Any:
    time.sleep(0.3)
    model = model_of()
    for p in model.parameters():
        p.data.normal_()  # not theirs
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    handle = pycomm.local_sgd(optimizer, model, join=f"127.0.0.1:{port}", **options_of(course))
    return go_on(course, handle, model, handle.world[-1], handle.stats()["steps"])


@pytest.mark.parametrize(("outer", "delay"), [(OUTER, 0), (OUTER, 3), (ELASTIC, 0)], ids=repr)
def test_one_that_comes_begins_with_what_the_others_have(new_ranks: Pools, outer: Any, delay: int) -> None:
    course = Course(2, 0, outer=outer, turns=HALVES, delay=delay, weighted=False)
    members = new_ranks(2)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(members.outcomes, stay, course, timeout=TIMEOUT)
        newcomer = threads.submit(new_ranks(1).outcomes, come, course, members.port, timeout=TIMEOUT)
        outcomes = [*first.result(), *newcomer.result()]
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        assert outcome.result["world"] == (0, 1, 2)
    begun = min(outcomes[2].result["parameters"])
    assert begun == outcomes[0].result["come"] == outcomes[1].result["come"]
    wanted = replace(course, steps=begun + AFTERWARDS, come={2: begun}).expected()
    for rank, outcome in enumerate(outcomes):
        for step, mine in outcome.result["parameters"].items():
            torch.testing.assert_close(mine, wanted[step][rank], rtol=1e-8, atol=1e-8)


def stay_until(course: Course, flag: str) -> tuple[int, ...]:
    """Train until there is such a file."""
    model = model_of()
    handle = pycomm.local_sgd(torch.optim.Adam(model.parameters(), 0.02), model, **options_of(course))
    is_over, step = torch.zeros(1), 0
    while not is_over:
        handle.optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        handle.optimizer.step()
        step += 1
        is_over.fill_(float(Path(flag).exists()))
        dist.broadcast(is_over, 0)
    world = handle.world
    handle.detach()
    return world


def come_otherwise(course: Course, port: int, flag: str) -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    try:
        with pytest.raises(ValueError, match="every=4"):
            pycomm.local_sgd(optimizer, model, join=f"127.0.0.1:{port}", **{**options_of(course), "every": 5})
        with pytest.raises(ValueError, match="join requires"):
            pycomm.local_sgd(optimizer, model, every=4, join=f"127.0.0.1:{port}")
        with pytest.raises(CommError, match="no store listens"):
            pycomm.local_sgd(optimizer, model, join="127.0.0.1:1", **{**options_of(course), "timeout": 1})
    finally:
        Path(flag).touch()


def test_one_with_other_settings_is_refused_and_harms_nobody(new_ranks: Pools, tmp_path: Path) -> None:
    course, members, flag = Course(2, 0, weighted=False), new_ranks(2), str(tmp_path / "over")
    with ThreadPoolExecutor() as threads:
        first = threads.submit(members.outcomes, stay_until, course, flag, timeout=TIMEOUT)
        newcomer = threads.submit(new_ranks(1).outcomes, come_otherwise, course, members.port, flag, timeout=TIMEOUT)
        outcomes = [*first.result(), *newcomer.result()]
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    assert outcomes[0].result == outcomes[1].result == (0, 1)
