"""``attach(backup=b)``: what scripts do between steps, and what goes wrong there, while a job stands by."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.training.reducer.backup import BackupPolicy, StandbyJob
from pycomm.worker import Worker
from tests.on_ranks import Pools
from tests.reducer.attaching import grouped
from tests.survival.test_backup import wait_for_the_others
from tests.survival.test_gaining_ranks import attach, come, equal_to_the_bit, go_on
from tests.survival.training import Plan, die, digest, loss_of, small_model

TIMEOUT = 100.0
SIZE = 3


def begin(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, pycomm.Reducer]:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    options = {"check_replicas": 0, "timeout": 30, **options}
    return model, optimizer, pycomm.attach(optimizer, model, **grouped(backup=1, **options))


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, dist.get_rank(), step).backward()
    optimizer.step()


def save_and_load(folder: str) -> tuple[str, str]:
    model, optimizer, reducer = begin()
    for step in range(3):
        take_step(model, optimizer, step)
    pycomm.save(folder, reducer).wait(20)
    saved = digest(model)
    for step in range(3):
        take_step(model, optimizer, step)
    pycomm.load(folder, reducer)
    loaded = digest(model)
    take_step(model, optimizer, 3)
    reducer.detach()
    return saved, loaded


def test_checkpoints_are_saved_and_loaded_between_steps(new_ranks: Pools, tmp_path: Path) -> None:
    for outcome in new_ranks(SIZE).outcomes(save_and_load, str(tmp_path), timeout=TIMEOUT):
        assert outcome.error is None, outcome.trace
        saved, loaded = outcome.result
        assert saved == loaded


def slow_or_not(plan: Plan, size: int) -> dict[str, Any]:
    model = small_model()
    reducer, scheduler = attach(plan, model)
    if dist.get_rank() == 2:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    return go_on(plan, reducer, scheduler, model, size)


def test_a_newcomer_is_announced_in_a_step_that_goes_on_without_a_rank(new_ranks: Pools) -> None:
    plan = Plan(founders=SIZE, options={"backup": 1, "check_replicas": 0})
    members = new_ranks(SIZE)
    with ThreadPoolExecutor() as threads:
        theirs = threads.submit(members.outcomes, slow_or_not, plan, SIZE + 1, timeout=TIMEOUT)
        its = threads.submit(new_ranks(1).outcomes, come, plan, SIZE + 1, members.port, timeout=TIMEOUT)
        told = equal_to_the_bit([theirs.result(), its.result()])
    assert told[0]["worlds"][-1] == (0, 1, 2, 3)


def raise_in_backward() -> tuple[int, ...]:
    """Ranks 0 and 1 catch an error when most of their gradients have been sent, and do something else for a while."""
    model, optimizer, reducer = begin(bucket_mb=0.004)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a hook of the user's failed")

    for step in range(5):
        if step == 3 and dist.get_rank() < 2:
            next(iter(model.parameters())).register_hook(fail)
        try:
            take_step(model, optimizer, step)
        except ValueError:
            time.sleep(10.0)
            break
    return reducer.world


def test_more_ranks_than_are_backed_up_raise_in_their_backward(new_ranks: Pools) -> None:
    ranks = new_ranks(SIZE)
    ranks.ask(raise_in_backward)
    answers = ranks.answers(8.0, [2])
    assert answers, "they have been waited for"
    assert answers[2].result == (2,)


def try_again(folder: str) -> tuple[str, int]:
    """Rank 1 fails in backward before the others go on without it in step 3, and afterwards in step 5."""
    model, optimizer, reducer = begin()
    rank, first = dist.get_rank(), next(iter(model.parameters()))
    for step in range(7):
        if rank == 1 and step in (3, 5):
            handle = first.register_hook(lambda _: 1 / 0)
            if step == 5:
                wait_for_the_others(Path(folder), step)
            try:
                loss_of(model, rank, step).backward()
            except ZeroDivisionError:
                handle.remove()
            wait_for_the_others(Path(folder), step)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        (Path(folder) / f"ended-{step}-{rank}").touch()
        optimizer.step()
    late = reducer.stats()["late"]
    reducer.detach()
    return digest(model), late


def test_a_backward_that_failed_before_anything_was_sent_is_repeated(new_ranks: Pools, tmp_path: Path) -> None:
    outcomes = new_ranks(SIZE).outcomes(try_again, str(tmp_path), timeout=TIMEOUT)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    assert len({outcome.result[0] for outcome in outcomes}) == 1
    assert outcomes[1].result[1] >= 2


def lose_a_rank_while_late() -> tuple[dict[str, torch.Tensor], Any, str]:
    """Rank 1 dies when it has all averages of a step that goes on without rank 2."""
    model, optimizer, reducer = begin()
    rank, policy = dist.get_rank(), reducer._engine.policy
    assert isinstance(policy, BackupPolicy)
    for step in range(3):
        take_step(model, optimizer, step)
    if rank == 1:
        policy.survival.commit = lambda *_: die()  # type: ignore[method-assign]
    elif rank == 2:
        deadline = time.monotonic() + 60.0
        while policy._standby is None or not policy._standby.is_late:
            assert time.monotonic() < deadline
            time.sleep(0.002)
    own: dict[str, torch.Tensor] = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda grad, name=name: own.update({name: grad.clone()}))
    take_step(model, optimizer, 3)
    assert reducer.world == (0, 2, 3)
    (carried,) = reducer.state_dict()["ranks"].values()
    reducer.detach()
    return own, carried, digest(model)


def test_late_gradients_count_as_much_as_those_that_were_reduced_again(new_ranks: Pools) -> None:
    outcomes = new_ranks(4).outcomes(lose_a_rank_while_late, timeout=TIMEOUT)
    assert len({outcomes[rank].result[2] for rank in (0, 2, 3)}) == 1
    own, carried, _ = outcomes[2].result
    for name, grad in own.items():
        torch.testing.assert_close(carried[name]["late"], grad / 3)


def drop() -> bool:
    model, optimizer, reducer = begin()
    for step in range(3):
        take_step(model, optimizer, step)
    dist.barrier()
    engine = weakref.ref(reducer._engine)
    del model, optimizer, reducer
    gc.collect()
    deadline = time.monotonic() + 10.0
    while engine() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return engine() is None


def test_a_job_that_stands_by_does_not_keep_what_is_dropped(new_ranks: Pools) -> None:
    assert [outcome.result for outcome in new_ranks(2).outcomes(drop, timeout=TIMEOUT)] == [True, True]


def test_a_forked_child_leaves_what_is_under_way_to_its_parent() -> None:
    """As a DataLoader's workers are, which may begin while a step goes on without this rank."""
    begun, may_end, ran = threading.Event(), threading.Event(), []

    def hold() -> None:
        begun.set()
        may_end.wait()

    standin, worker = StandbyJob(lambda: False, lambda: None, lambda: False), Worker("a job stands by")
    standin.add(hold)
    standin.add(lambda: ran.append(os.getpid()))
    work = worker.submit(standin.run)
    work.when_done(standin.end)
    begun.wait()
    child = os.fork()
    if child == 0:
        os._exit(len(ran))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    standin.complete()
    may_end.set()
    work.wait()
    assert ran == [os.getpid()]
    worker.stop(5.0)
