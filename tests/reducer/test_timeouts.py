"""Timeouts: the process group's own where none is given, everywhere; and one that is given as it is."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import CommError, Communicator, torch_internals
from pycomm.checks import LONGEST_TIMEOUT
from pycomm.collectives.transport.own_group import timeout_seconds
from tests.on_ranks import on_ranks
from tests.reducer.attaching import grouped
from tests.reducer.models import loss_of, make_model, sgd

Body = Callable[..., Any]


def optimizer_and_model() -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Linear(4, 2)
    return torch.optim.SGD(model.parameters(), lr=0.1), model


MEETINGS: dict[str, Body] = {
    "Communicator": lambda group, **given: Communicator(group, **given),
    "attach": lambda group, **given: pycomm.attach(*optimizer_and_model(), process_group=group, **grouped(**given)),
    "shrink": lambda group, **given: pycomm.attach(
        *optimizer_and_model(), process_group=group, survive=pycomm.Survive(), **given
    ),
    "local_sgd": lambda group, **given: pycomm.local_sgd(*optimizer_and_model(), every=2, process_group=group, **given),
    "gossip": lambda group, **given: pycomm.gossip(*optimizer_and_model(), process_group=group, **given),
}
SERVERS: dict[str, Body] = {  # which meet in the default group
    "server": lambda **given: pycomm.parameter_server(*optimizer_and_model(), **given),
    "attach": lambda **given: pycomm.attach(*optimizer_and_model(), **grouped(**given)),
}


def test_no_public_function_has_a_default_of_its_own() -> None:
    functions: list[Any] = [
        *(Communicator, pycomm.Tuning, pycomm.ddp.register, pycomm.ddp.register_hsdp, pycomm.parameter_server),
        *(pycomm.local_sgd, pycomm.gossip),
    ]
    assert {function: inspect.signature(function).parameters["timeout"].default for function in functions} == (
        dict.fromkeys(functions)
    )


def alone(meet: Callable[[], Any], least: float, most: float) -> None:
    """Rank 0 meets nobody, and says so after the time that it is to wait."""
    start = time.monotonic()
    with pytest.raises(CommError):
        meet()
    assert least < time.monotonic() - start < most


@on_ranks(2, fresh=True)
def test_the_groups_own_counts() -> None:
    """Rank 1 does not come."""
    quick = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    end = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    for meet in MEETINGS.values():
        if dist.get_rank() == 0:
            alone(lambda meet=meet: meet(quick), 0.4, 9)  # type: ignore[misc]
        dist.barrier(end)


@on_ranks(2, fresh=True)
def test_the_default_groups_own_counts() -> None:
    end = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    world = dist.group.WORLD
    assert world is not None
    torch_internals.backend_of(world, torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
    for meet in SERVERS.values():
        if dist.get_rank() == 0:
            alone(meet, 0.9, 9)
        dist.barrier(end)


@on_ranks(2, fresh=True)
def test_a_given_one_counts() -> None:
    """Shorter or longer than the group's, by seconds or a timedelta."""
    slow, quick = (dist.new_group([0, 1], timeout=timedelta(seconds=s)) for s in (60, 1))
    for meet in (MEETINGS["Communicator"], MEETINGS["attach"], MEETINGS["local_sgd"]):
        for given in (0.7, timedelta(seconds=0.7)):
            if dist.get_rank() == 0:
                alone(lambda meet=meet, given=given: meet(slow, timeout=given), 0.6, 9)  # type: ignore[misc]
        dist.barrier(slow)
    if dist.get_rank() == 1:
        time.sleep(3)
    MEETINGS["attach"](quick, timeout=30).detach()


@on_ranks(2, fresh=True)
def test_a_late_rank_is_waited_for_as_long_as_the_group_says() -> None:
    slow = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    model = make_model()
    optimizer = sgd(model)
    reducer = pycomm.attach(optimizer, model, process_group=slow)
    for step in range(2):
        if dist.get_rank() == step:
            time.sleep(1.5)
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    reducer.detach()


def made_of(backend: str, seconds: float) -> Any:
    return dist.new_group([0, 1], backend=backend, timeout=timedelta(seconds=seconds))


@pytest.mark.parametrize("backend", ["gloo", "pycomm"])
@on_ranks(2, fresh=True)
def test_every_kind_of_group_tells(backend: str) -> None:
    group = made_of(backend, 77.5)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    for given in (group, mesh):
        with Communicator(given) as communicator:
            assert communicator.channel.timeout == 77.5
        with Communicator(given, 5) as communicator:
            assert communicator.channel.timeout == 5
    ddp_model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    made: list[float] = []

    class Noted(Communicator):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self.channel.timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pycomm.ddp.hook.Communicator", Noted)
        pycomm.ddp.register(ddp_model)
    assert made == [77.5]
    torch_internals.backend_of(group, torch.device("cpu"))._set_default_timeout(timedelta(seconds=66))
    assert timeout_seconds(None, group) == 66


@on_ranks(2, fresh=True)
def test_groups_under_torchs_own_checks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
        vars(dist)["set_debug_level_from_env"]()
        group = made_of("gloo", 55)
        assert "Wrapper" in type(torch_internals.backend_of(group, torch.device("cpu"))).__name__
        assert timeout_seconds(None, group) == 55


@pytest.mark.usefixtures("one_rank_group")
def test_groups_that_tell_nothing_useful() -> None:
    """An endless one is a year's, and torch's own default stands for one that is none."""
    half_an_hour = 1800.0
    assert timeout_seconds(None) == half_an_hour
    for told, wanted in ((timedelta(days=100_000), LONGEST_TIMEOUT), (timedelta(0), half_an_hour)):
        assert timeout_seconds(None, dist.new_group([0], timeout=told)) == wanted


def test_without_any_group() -> None:
    assert timeout_seconds(None) == 1800.0
    assert timeout_seconds(timedelta(seconds=3)) == 3.0


@pytest.mark.parametrize("wrong", [0, -1.0, "soon", timedelta(0), timedelta(days=400), float("nan")])
@on_ranks(2)
def test_wrong_ones_are_refused_on_all_ranks(wrong: Any) -> None:
    given = wrong if dist.get_rank() == 1 else 20
    for meet in (MEETINGS["Communicator"], MEETINGS["attach"], MEETINGS["local_sgd"]):
        with pytest.raises((TypeError, ValueError), match="timeout is"):
            meet(None, timeout=given)
