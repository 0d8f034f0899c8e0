"""Parameter servers and gossip: a worker that trains something else is told, and nothing is pushed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.asynchronous.runs import loss_of, model_of
from tests.on_ranks import on_ranks

TIMEOUT = 60.0


def replace(model: Any, optimizer: Any) -> Any:
    model[0].bias = nn.Parameter(model[0].bias.detach().clone())
    return model


def assign(model: Any, optimizer: Any) -> Any:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model


def train_a_copy(model: Any, optimizer: Any) -> Any:
    return copy.deepcopy(model)


def change_the_rate(model: Any, optimizer: Any) -> Any:
    optimizer.param_groups[0]["lr"] = 0.01
    return model


CHANGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "replaced": (replace, "'0.bias' of the module is not the parameter.*call parameter_server"),
    "assigned": (assign, "'0.weight' of the module is not the parameter.*call parameter_server"),
    "a copy": (train_a_copy, "copy"),
    "another rate": (change_the_rate, "'lr' of parameter group 0 was changed on this worker, from 0.05 to 0.01"),
}


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "train something else on a server's worker, or change its rate",
    "Error; nothing is pushed.",
)
@pytest.mark.parametrize("how", CHANGES)
@on_ranks(2, timeout=TIMEOUT)
def test_a_worker_that_trains_something_else_is_told(how: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    server = pycomm.parameter_server(optimizer, model, timeout=20)
    if server.is_worker:
        with server.step():
            loss_of(model, 1, 0).backward()
        change, says = CHANGES[how]
        trained = change(model, optimizer)
        with pytest.raises((ValueError, RuntimeError), match=says):
            with server.step():
                loss_of(trained, 1, 1).backward()
        assert server.stats()["steps"] == 1
    server.close()


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "step averaged parameters with another optimizer",
    "Error before that step. Call `detach()` or `close()` first.",
)
@on_ranks(2)
def test_another_optimizer_on_a_worker_is_refused_until_it_closes() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    server, other = pycomm.parameter_server(optimizer, model, timeout=20), torch.optim.SGD(model.parameters(), 0.05)
    if server.is_worker:
        other.step()  # without gradients it moves nothing
        loss_of(model, 1, 0).backward()
        with pytest.raises(ValueError, match=r"a SGD other than the SGD passed to parameter_server\(\) is about"):
            other.step()
    server.close()
    other.step()


def train_a_hidden_copy(model: Any, optimizer: Any) -> None:
    loss_of(copy.deepcopy(model).eval(), 1, 1).backward()  # in eval mode, where copies are not watched


def clear_after_backward(model: Any, optimizer: Any) -> None:
    loss_of(model, 1, 1).backward()
    optimizer.zero_grad()


BODIES: dict[str, Callable[[Any, Any], None]] = {
    "a batch left out": lambda model, optimizer: None,
    "a copy": train_a_hidden_copy,
    "cleared": clear_after_backward,
}


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "call `server.step()` without gradients",
    "Error on that worker; nothing is pushed.",
)
@pytest.mark.parametrize("body", BODIES)
@on_ranks(2, timeout=TIMEOUT)
def test_a_step_without_any_gradient_is_an_error_and_moves_nothing(body: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    server = pycomm.parameter_server(optimizer, model, timeout=20)
    if server.is_worker:
        with server.step():
            loss_of(model, 1, 0).backward()
        server.pull()
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="no parameter has a gradient.*nothing was pushed"):
            with server.step():
                BODIES[body](model, optimizer)
        server.pull()  # leaves a batch out
        torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
        with server.step():  # one parameter is enough
            next(model.parameters()).square().sum().backward()
        assert server.stats()["steps"] == 2
        assert server.stats()["servers"][0]["updates"] == 2
    server.close()


@on_ranks(2, timeout=TIMEOUT)
def test_a_schedule_may_change_a_workers_numbers() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    server = pycomm.parameter_server(optimizer, model, timeout=20)
    server.schedule(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.1 * (n + 1)))
    if server.is_worker:
        for number in range(3):
            with server.step():
                loss_of(model, 1, number).backward()
    server.close()


def gossip_until_an_error(change: Callable[[Any, Any], Any], steps: int, says: str, **options: Any) -> None:
    """Train by gossip, and ``change`` something on rank 1 before the third step; "" for no error."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = pycomm.gossip(optimizer, model, timeout=20, **options)

    def train() -> None:
        stepped = optimizer
        for number in range(steps):
            if number == 2 and dist.get_rank() == 1:
                stepped = change(model, optimizer)
            stepped.zero_grad()
            loss_of(model, dist.get_rank(), number).backward()
            stepped.step()

    if says:
        with pytest.raises((ValueError, pycomm.CommError), match=says):
            train()
    else:
        train()
        handle.average()
    handle.detach()


def use_another_rate(model: Any, optimizer: Any) -> Any:
    optimizer.param_groups[0]["lr"] = 0.01
    return optimizer


def replace_one(model: Any, optimizer: Any) -> Any:
    replace(model, optimizer)
    return optimizer


def assign_with_a_new_optimizer(model: Any, optimizer: Any) -> Any:
    assign(model, optimizer)
    return torch.optim.SGD(model.parameters(), 0.05)


def use_another_optimizer(model: Any, optimizer: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.05)


@pytest.mark.behavior(
    "Ranks that differ",
    "`the ranks' optimizers differ: ... of parameter group ... is ...`",
    'Causes: a schedule by the local loss, a checkpoint on one rank, a skipped step. If intended: `per_rank=("lr",)`.',
)
@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_gossip_with_another_rate_is_an_error_unless_declared() -> None:
    gossip_until_an_error(use_another_rate, 4, "'lr' of parameter group 0 is 0.05 on rank 0, 0.01 on rank 1")
    gossip_until_an_error(use_another_rate, 4, "", per_rank=("lr",))


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "replace parameters, or use another optimizer",
    "Error. Call `local_sgd` or `gossip` again.",
)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (replace_one, "'0.bias' of the module is not the parameter"),
        (assign_with_a_new_optimizer, "'0.weight' of the module is not the parameter"),
        (use_another_optimizer, r"a SGD other than the SGD passed to gossip\(\) is about to step '0.weight'"),
    ],
    ids=["replaced", "assigned", "another optimizer"],
)
@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_gossip_that_something_else_steps_is_an_error(change: Callable[[Any, Any], Any], says: str) -> None:
    gossip_until_an_error(change, 12, says)


@pytest.mark.behavior(
    "Local SGD, gossip and parameter servers",
    "skip a batch on one rank",
    "Error when it next averages with others; `skip_step()` declares it.",
)
@pytest.mark.parametrize("leaves_out", [True, False], ids=["left out", "skip_step"])
@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_a_batch_that_one_rank_leaves_out_in_gossip_is_named(leaves_out: bool) -> None:
    model, rank = model_of(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = pycomm.gossip(optimizer, model, timeout=20)
    says = ""
    try:
        for number in range(7):
            optimizer.zero_grad()
            loss = loss_of(model, rank, number)
            if number == (5, 3)[rank]:  # each another one: at the end all have made equally many steps
                if not leaves_out:
                    handle.skip_step()
                continue
            loss.backward()
            optimizer.step()
    except RuntimeError as error:  # a CommError is one, too
        says = str(error)
    assert ("rank 1 left out a batch" in says) if leaves_out else not says
    assert not says or "skip_step" in says
    handle.detach()


@on_ranks(2, timeout=TIMEOUT, fresh=True)
def test_a_step_that_a_scaler_skips_on_one_rank_counts_in_gossip() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    handle = pycomm.gossip(optimizer, model, timeout=20)
    scaler = torch.amp.GradScaler("cpu", 2.0**8)
    for number in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), number)
        scaler.scale(loss * (float("inf") if number == 3 and dist.get_rank() else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert handle.stats()["mixings"] == 6
    handle.average()
    handle.detach()
