"""Under DistributedDataParallel and fully_shard, an error names what ranks do not do alike."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import pycomm
from pycomm.ddp import register
from pycomm.ddp.comparison import PassComparison, SteppedOptimizers
from pycomm.ddp.registration import checked_settings
from pycomm.optim.guard import _watches
from pycomm.training.reductions.phase import HostCopy, StepState
from tests.ddp.test_hsdp_uses import loss_of as shards_loss_of
from tests.ddp.test_hsdp_uses import replicated
from tests.ddp.wrapping import OutOfOrder, wrapped
from tests.on_ranks import on_ranks
from tests.reducer.models import loss_of, make_model, sgd

Step = Callable[[int], None]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [p]} for p in model.parameters()]
    return torch.optim.AdamW(groups, lr=0.01)


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), number).backward()
        optimizer.step()

    return step


NUMBERS: dict[str, Any] = {"lr": 0.3, "betas": (0.5, 0.999), "weight_decay": 0.1, "amsgrad": True}


@pytest.mark.behavior(
    "Ranks that differ",
    "`the ranks' optimizers differ: ... of parameter group ... is ...`",
    'Causes: a schedule by the local loss, a checkpoint on one rank, a skipped step. If intended: `per_rank=("lr",)`.',
)
@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
@on_ranks(2)
def test_a_number_of_a_group_that_differs_is_named(key: str, given: bool) -> None:
    model = DistributedDataParallel(make_model())
    optimizer = adam(model)
    handle = register(model, optimizer=optimizer if given else None, timeout=30)
    step = training(model, optimizer)
    step(0)
    if dist.get_rank() == 1:
        optimizer.param_groups[1][key] = NUMBERS[key]
    with pytest.raises(
        ValueError, match=f"differ: '{key}' of parameter group 1 is .* on rank 0, .* on rank 1.*per_rank"
    ):
        step(1)
    handle.remove()


@on_ranks(2)
def test_a_given_optimizer_is_compared_before_its_first_step() -> None:
    model = DistributedDataParallel(make_model())
    optimizer = sgd(model, 0.1 * (1 + dist.get_rank()))
    handle = register(model, optimizer=optimizer, timeout=30)
    with pytest.raises(ValueError, match="'lr' of parameter group 0 is 0.1 on rank 0, 0.2 on rank 1"):
        training(model, optimizer)(0)
    handle.remove()


@on_ranks(2)
def test_what_is_declared_per_rank_may_differ() -> None:
    model = DistributedDataParallel(make_model())
    optimizer = sgd(model, 0.1 * (1 + dist.get_rank()))
    handle = register(model, optimizer=optimizer, per_rank=["lr"], check_replicas=0, timeout=30)
    step = training(model, optimizer)
    for number in range(3):
        step(number)
    optimizer.param_groups[0]["momentum"] = 0.1 * dist.get_rank()
    with pytest.raises(ValueError, match="'momentum' of parameter group 0 is"):
        step(3)
    handle.remove()


@on_ranks(2)
def test_of_several_optimizers_the_one_that_differs_is_named() -> None:
    with wrapped(make_model()) as (model, _):
        first, *others = model.parameters()
        optimizers = [torch.optim.SGD([first], 0.1), torch.optim.AdamW(others, 0.1 * (1 + dist.get_rank()))]
        for number in range(2):
            loss = loss_of(model, dist.get_rank(), number)
            if number == 1:
                with pytest.raises(
                    ValueError, match="'lr' of parameter group 0 of the optimizer of '0.bias' is 0.1 on"
                ):
                    loss.backward()
                return
            loss.backward()
            for optimizer in reversed(optimizers) if dist.get_rank() else optimizers:
                optimizer.step()


@on_ranks(2)
def test_per_rank_takes_names() -> None:
    model = DistributedDataParallel(make_model())
    for wrong in (5, "lr", [5]):
        with pytest.raises(TypeError, match="per_rank is .*, wanted names of hyperparameters"):
            register(model, per_rank=wrong)  # type: ignore[arg-type]


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod",
    "step twice on one rank under `pycomm.ddp`",
    "`RuntimeError` everywhere in the next averaged pass.",
)
@on_ranks(2)
def test_a_second_step_on_one_rank_is_named() -> None:
    with wrapped(make_model()) as (model, _):
        optimizer = sgd(model, 0.1)
        step = training(model, optimizer)
        for number in range(3):
            step(number)
        if dist.get_rank() == 1:
            optimizer.step()
        with pytest.raises(RuntimeError, match=r"out of step: calls of step\(\) .*'0.weight'.*rank 0: 1, rank 1: 2"):
            step(3)


@pytest.mark.behavior(
    "Ranks that differ",
    "`... left out a batch: ...`",
    "That rank ran `continue` after forward or `zero_grad()`. Use `skip_batch()` or `veto_step()`; under "
    "`pycomm.ddp`, skip it everywhere.",
)
@on_ranks(2)
def test_a_batch_that_one_rank_leaves_out_is_named() -> None:
    with wrapped(OutOfOrder()) as (model, _):
        optimizer = sgd(model, 0.1)
        for number in range(6):
            loss = loss_of(model, dist.get_rank(), number)
            if number == (5, 3)[dist.get_rank()]:  # each leaves out one, so that none would wait at the end
                continue
            if number == 3 + dist.get_rank():  # of the other batches, these are averaged with one another
                with pytest.raises(RuntimeError, match="rank 1 left out a batch: forwards.* rank 0: 0, rank 1: 1"):
                    loss.backward()
                return
            loss.backward()
            optimizer.step()
    raise AssertionError("nothing was raised")


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod",
    "let ranks differ under `register_hsdp`",
    "The same errors as under `pycomm.ddp`; rank numbers are the replica group's.",
)
@on_ranks(2, timeout=60)
def test_replicas_of_shards_that_differ_are_named() -> None:
    for says in ("'lr' of parameter group 0 is 0.1 on rank 0, 0.2 on rank 1", "out of step.*rank 0: 1, rank 1: 2"):
        with replicated(1) as (net, _):
            optimizer = torch.optim.SGD(net.parameters(), 0.1)

            def step(number: int, net: Any = net, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                shards_loss_of(net, dist.get_rank(), number, [0, 1]).backward()
                optimizer.step()

            step(0)
            if dist.get_rank() == 1 and "lr" in says:
                optimizer.param_groups[0]["lr"] = 0.2
            elif dist.get_rank() == 1:
                optimizer.step()
            with pytest.raises((ValueError, RuntimeError), match=says):
                step(1)


def write(model: Any) -> None:
    model.module[2].bias.data[3] += 1.0


def load(model: Any) -> None:
    model.module.load_state_dict({name: 2 * p for name, p in model.module.state_dict().items()})


def scale_average(model: Any) -> None:
    for p in model.parameters():
        p.grad *= 0.5


def bypass(model: Any) -> None:
    model.zero_grad()
    loss_of(model.module, 1, 7).backward()  # which torch's hooks do not see


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod",
    "write parameters, shards or averages on one rank",
    "Error after 1, 2, 4, ... passes, up to `check_replicas`.",
)
@pytest.mark.parametrize("change", [write, load, scale_average, bypass], ids=lambda change: change.__name__)
@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.5)], ids=["dense", "sparse"])
@on_ranks(2)
def test_parameters_that_drift_apart_are_found_soon(change: Callable[[Any], None], compression: Any) -> None:
    with wrapped(make_model(), compression) as (model, _):
        optimizer = sgd(model, 0.1)
        for number in range(4):
            loss_of(model, dist.get_rank(), number).backward()
            if number == 3 and dist.get_rank() == 1:
                change(model)
            optimizer.step()
            optimizer.zero_grad()
        loss_of(model, dist.get_rank(), 4).backward()  # finds it, and the step asks again
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match="the replicas differ after 4 reductions: parameter '[02].*'"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod",
    "`the optimizer of ... has made ... steps since the last backward pass that was averaged: ...`",
    "Call the wrapper, not its module. If you average yourself: `check_replicas=0`.",
)
@on_ranks(2)
def test_many_steps_without_an_average_are_an_error() -> None:
    for interval, alone in ((1000, False), (0, False), (1000, True)):
        model: Any = DistributedDataParallel(make_model())
        handle = register(model, check_replicas=interval, timeout=30)
        optimizer = sgd(model, 0.1)
        training(model, optimizer)(0)
        if alone:
            with model.no_sync():
                loss_of(model, dist.get_rank(), 1).backward()
        step = training(model.module, optimizer)
        for number in range(7):
            step(number)
        if alone or interval == 0:
            step(7)
        else:
            with pytest.raises(RuntimeError, match="of '0.weight' has made 9 steps since .*check_replicas"):
                step(7)
        handle.remove()


@on_ranks(2)
def test_many_steps_in_which_a_model_takes_no_part_are_right() -> None:
    """One optimizer for two models that are trained in turns; zero_grad() sets their gradients to 0."""
    models: list[Any] = [DistributedDataParallel(make_model()) for _ in range(2)]
    handles = [register(model, timeout=30) for model in models]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)
    for step in range(20):
        optimizer.zero_grad(set_to_none=False)
        loss_of(models[step > 2], dist.get_rank(), step).backward()
        optimizer.step()
    for handle in handles:
        handle.remove()


@pytest.mark.behavior(
    "DistributedDataParallel, HSDP and Horovod",
    "write parameters, shards or averages on one rank",
    "Error after 1, 2, 4, ... passes, up to `check_replicas`.",
)
@on_ranks(2, timeout=60)
def test_shards_that_drift_apart_are_found_soon() -> None:
    with replicated(1) as (net, _):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        shards_loss_of(net, dist.get_rank(), 0, [0, 1]).backward()
        for p in net.parameters():
            if p.grad is not None:
                p.grad *= 1 + dist.get_rank()
        optimizer.step()
        shards_loss_of(net, dist.get_rank(), 1, [0, 1]).backward()
        with pytest.raises(RuntimeError, match="the replicas differ after 1 reductions: parameter 'layers.0.weight'"):
            optimizer.step()


# What is right, and stays so.


class Twice(nn.Module):
    """A layer whose forward is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def accumulated(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    with model.no_sync():
        for part in range(1 + dist.get_rank()):
            loss_of(model, dist.get_rank(), part).backward()
    loss_of(model, dist.get_rank(), number).backward()
    optimizer.step()


def two_forwards(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    (loss_of(model, dist.get_rank(), number) - loss_of(model, dist.get_rank(), 10 + number)).backward()
    optimizer.step()


def unused_forward(model: Any, optimizer: Any, number: int) -> None:
    loss_of(model, dist.get_rank(), 10 + number).detach()  # as of a generator, whose discriminator is trained
    training(model, optimizer)(number)


def evaluated_on_one(model: Any, optimizer: Any, number: int) -> None:
    training(model, optimizer)(number)
    if dist.get_rank() == 0:
        with torch.no_grad():
            loss_of(model, 0, number)
        model.eval()
        loss_of(model, 0, number)
        model.train()
        loss_of(model.module, 0, number)


def renewed(model: Any, optimizer: Any, number: int) -> None:
    fresh = sgd(model, 0.1 / (1 + number))
    if dist.get_rank() == 0:
        vars(fresh)["itself"] = fresh  # garbage that is not collected at once
    training(model, fresh)(number)


def saved_on_one(model: Any, optimizer: Any, number: int) -> None:
    training(model, optimizer)(number)
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        get_optimizer_state_dict(model, optimizer)


def with_a_closure(model: Any, optimizer: Any, number: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, dist.get_rank(), number)
        loss.backward()
        return loss

    optimizer.step(closure)


def another_optimizer(model: Any, optimizer: Any, number: int) -> None:
    training(model, optimizer)(number)
    own = torch.nn.Linear(2, 2)
    elsewhere = torch.optim.SGD(own.parameters(), 0.1 * (1 + dist.get_rank()))
    for _ in range(dist.get_rank()):
        own(torch.ones(2)).sum().backward()
        elsewhere.step()


RIGHT = [accumulated, two_forwards, unused_forward, evaluated_on_one, renewed, saved_on_one, with_a_closure]
RIGHT += [another_optimizer]


@pytest.mark.parametrize("do", RIGHT, ids=lambda do: do.__name__)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
@on_ranks(2)
def test_what_all_ranks_may_do(do: Callable[[Any, Any, int], None], options: dict[str, Any]) -> None:
    with wrapped(OutOfOrder(), **options) as (model, handle):
        optimizer = sgd(model, 0.1)
        for number in range(4):
            do(model, optimizer, number)
        assert handle.stats()["steps"] == 4
    same_on_all(model)


def same_on_all(model: nn.Module) -> None:
    for p in model.parameters():
        of_first = p.detach().clone()
        dist.broadcast(of_first, 0)
        assert torch.equal(p, of_first)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=["plain", "static graph"])
@on_ranks(2)
def test_recomputed_forwards_and_static_graphs(options: dict[str, Any]) -> None:
    with wrapped(Twice(), **options) as (model, handle):
        step = training(model, sgd(model, 0.1))
        for number in range(4):
            step(number)
        assert handle.stats()["steps"] == 4


@pytest.mark.parametrize("compression", [None, pycomm.TopK(0.5)], ids=["dense", "sparse"])
@on_ranks(2, 3)
def test_ranks_that_have_joined_are_not_compared(compression: Any) -> None:
    with wrapped(make_model(), compression) as (model, _):
        optimizer = sgd(model, 0.1)
        for epoch in range(2):
            with model.join():
                for number in range(2 + dist.get_rank() * (1 + epoch)):
                    training(model, optimizer)(number)
        training(model, optimizer)(9)
        if dist.get_rank() == 1:
            optimizer.step()
        with pytest.raises(RuntimeError, match="out of step"):
            training(model, optimizer)(10)


@on_ranks(3)
def test_an_optimizer_that_holds_other_shards_on_each_rank() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(12, 5).double())  # two parameters: one rank has none
    handle = register(model, timeout=30)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for number in range(4):
        training(model, optimizer)(number)
    assert handle.stats()["steps"] == 4
    handle.remove()


class Again(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # runs torch's hooks twice
        return super().step(closure)


def fail(*_: Any) -> None:
    raise ArithmeticError("in a step")


def test_a_step_inside_another_counts_once() -> None:
    model = make_model()
    watched = SteppedOptimizers(dict(model.named_parameters()), None, ())
    outer, inner = Again(model.parameters(), 0.1), sgd(model, 0.1)
    handle = outer.register_step_pre_hook(lambda *_: inner.step())
    model(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
    outer.step()
    assert watched.counts == {"0.weight": 1}
    handle.remove()
    failing = outer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        outer.step()
    failing.remove()
    outer.step()
    assert watched.counts == {"0.weight": 2}


@on_ranks(2)
def test_on_a_gpu_flags_are_compared_two_steps_later() -> None:
    with wrapped(make_model()) as (model, handle):
        # The host then reads copies of the flags.
        handle._comparison.fingerprint._seen = [HostCopy(64, torch.device("cpu")) for _ in range(2)]
        optimizer = sgd(model, 0.1 * (1 + dist.get_rank()))
        step = training(model, optimizer)
        for number in range(3):  # the second step carries what the first one found
            step(number)
        with pytest.raises(ValueError, match="'lr' of parameter group 0 is 0.1 on rank 0, 0.2 on rank 1"):
            step(3)


def test_watches_end_with_the_loop() -> None:
    before, model = len(_watches), make_model()
    no_ranks: Any = SimpleNamespace(size=1)
    settings, params = checked_settings(None, None, None), dict(model.named_parameters())
    comparison = PassComparison(model, params, no_ranks, settings, torch.device("cpu"), StepState(), reads_late=False)
    assert len(_watches) == before + 1
    comparison.remove()
    del comparison
    gc.collect()
    assert len(_watches) == before


def test_a_watch_may_end_while_an_optimizer_steps() -> None:
    model = make_model()
    watches = [SteppedOptimizers(dict(model.named_parameters()), None, ())]
    handle = register_optimizer_step_post_hook(lambda *_: watches.clear())
    try:
        sgd(model, 0.1).step()
    finally:
        handle.remove()
    assert not watches
