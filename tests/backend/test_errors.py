"""Errors over "pycomm": whoever waits for whom, and however, gets an error that says why; nothing crashes.

Each of what is known to go wrong between torch and backends written in Python is a test here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.torch_internals import PrefixStore, store_of
from tests.backend.groups import pycomm_group
from tests.on_ranks import Pools, on_ranks

LONGEST = 1.5  # seconds from a death to the error: a second, and what a loaded machine takes


def a_model(**settings: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    layers = torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(4)])
    return DistributedDataParallel(layers, bucket_cap_mb=0.1, **settings), torch.randn(4, 200)


def fails(call: Callable[[], Any]) -> tuple[BaseException, float]:
    start = time.monotonic()
    try:
        call()
    except BaseException as error:
        return error, time.monotonic() - start
    raise AssertionError("no error")


def on_pycomm(timeout: float = 30.0) -> None:
    """Make the pool's ranks a world over "pycomm"."""
    rank, size, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert world is not None
    store = PrefixStore("again", store_of(world))
    dist.destroy_process_group()
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


def backward_beside_a_death(settings: dict[str, Any]) -> tuple[type, str, Any, float]:
    on_pycomm()
    model, x = a_model(**settings)
    for _ in range(2):
        model(x).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error, seconds = fails(lambda: model(x).sum().backward())
    again, _ = fails(lambda: dist.all_reduce(torch.ones(2)))
    assert isinstance(again, pycomm.CommError)
    dist.destroy_process_group()
    return type(error), str(error), getattr(error, "peer", None), seconds


WAYS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_a_death_comes_out_of_backward(new_ranks: Pools, settings: dict[str, Any]) -> None:
    pool = new_ranks(2)
    outcome = pool.outcomes(backward_beside_a_death, settings)[0]
    assert outcome.error is None, outcome.trace
    kind, text, peer, seconds = outcome.result
    assert issubclass(kind, pycomm.CommError)
    assert issubclass(kind, dist.DistBackendError)
    assert "rank 0: all_reduce" in text or "rank 0: broadcast" in text  # of module buffers, before
    assert "rank 1 died" in text
    assert peer == 1
    assert seconds < LONGEST + 10  # a bound against hanging; how long it takes is in the text


def death_beside_everything() -> list[str]:
    with pycomm_group() as group:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(300_000)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        first, seconds = fails(work.wait)
        assert isinstance(first, pycomm.CommError)
        assert seconds < LONGEST + 10
        assert work.is_completed()
        found = [str(first)]
        for call in (
            work.wait,
            lambda: work.get_future().wait(),
            lambda: work.get_future().then(lambda future: future.value()).wait(),
            lambda: dist.all_reduce(x, group=group),
            lambda: functional.all_reduce(x, "sum", group) + 1,
            lambda: dist.barrier(group=group),
            lambda: dist.broadcast(x, 0, group=group),
            lambda: dist.all_gather([x.clone(), x.clone()], x, group=group),
        ):
            found.append(str(fails(call)[0]))
        return found


def test_no_way_of_waiting_loses_an_error(new_ranks: Pools) -> None:
    outcome = new_ranks(2).outcomes(death_beside_everything)[0]
    assert outcome.error is None, outcome.trace
    assert all("rank 1 died" in text for text in outcome.result), outcome.result


def timed_out() -> tuple[type, str]:
    with pycomm_group(timeout=1.0) as group:
        if dist.get_rank() == 1:
            dist.barrier()  # of the group on Gloo: until the other has given up
            with contextlib.suppress(RuntimeError):
                dist.all_reduce(torch.ones(2), group=group)
            return type(None), ""
        error, seconds = fails(lambda: dist.all_reduce(torch.ones(2), group=group))
        dist.barrier()
        assert 0.7 < seconds < 5.0
        return type(error), str(error)


def test_a_timeout_is_torchs(new_ranks: Pools) -> None:
    kind, text = new_ranks(2).run(timed_out)[0]
    assert issubclass(kind, dist.DistBackendError)
    assert "timed out waiting for rank 1" in text


@on_ranks(2)
def test_the_limit_of_one_wait() -> None:
    """``Work.wait(timeout)`` gives up, and the operation goes on."""
    rank = dist.get_rank()
    with pycomm_group() as group:
        x = torch.ones(5)
        if rank == 1:
            time.sleep(1.0)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        if rank == 0:
            with pytest.raises(RuntimeError, match="(?i)timed out"):
                work.wait(timedelta(milliseconds=100))
        work.wait()
        assert x.eq(2).all()


@on_ranks(2)
def test_wrong_in_backward() -> None:
    """Ranks whose models differ get an error out of backward(), and no crash."""
    rank = dist.get_rank()

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(torch.ones(100_000 + rank), group=group, async_op=True)
            return grad

    with pycomm_group() as group, pytest.raises(ValueError, match="the ranks disagree"):
        Other.apply(torch.ones(1, requires_grad=True)).sum().backward()


def aborted() -> str:
    group: Any = dist.new_group(backend="pycomm")
    if dist.get_rank() == 1:
        time.sleep(0.5)
        group.abort()
        return str(fails(lambda: dist.all_reduce(torch.ones(1), group=group))[0])
    return str(fails(lambda: dist.all_reduce(torch.ones(1), group=group))[0])


def test_abort(new_ranks: Pools) -> None:
    waiting, own = new_ranks(2).run(aborted)
    assert "rank 1 gave up" in waiting
    assert "aborted its process group" in waiting
    assert "closed" in own


def again_and_again() -> None:
    for turn in range(3):
        on_pycomm()
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.eq(dist.get_world_size()).all()
        part = dist.new_group([0])
        if dist.get_rank() == 0:
            dist.all_reduce(x, group=part)
        assert dist.get_backend() == "pycomm", turn


def test_destroy_and_init_again(new_ranks: Pools) -> None:
    new_ranks(3).run(again_and_again)
