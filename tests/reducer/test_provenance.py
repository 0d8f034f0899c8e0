"""Gradients that nobody averaged: a step on them is an error, and ``reduce()`` averages them."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pycomm
from pycomm.optim.guard import _watches
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, over, own_state
from tests.reducer.models import average_gradients, batch_of, close, loss_of, losses_at, make_model, sgd

NOT_AVERAGED = "rank {}: the gradient of '.*' has not been averaged"


def by_hand(model: nn.Module, rank: int, step: int) -> None:
    """Write gradients as meta-learning, PCGrad and clipping by sample do."""
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(model, rank, step), params), strict=True):
        param.grad = grad


def by_func(model: nn.Module, rank: int, step: int) -> None:
    x, y = batch_of(rank, step)

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return (torch.func.functional_call(model, params, (x,)) - y).square().mean()

    grads: dict[str, torch.Tensor] = torch.func.grad(loss)({n: p.detach() for n, p in model.named_parameters()})
    for name, param in model.named_parameters():
        param.grad = grads[name]


WAYS = {"autograd.grad": by_hand, "func.grad": by_func}


@pytest.mark.behavior(
    "Gradients",
    "write `.grad` from `torch.autograd.grad` or `torch.func.grad`, and step",
    "Error before anything is written. Call `reducer.reduce()` first.",
)
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_step_on_written_gradients_is_an_error(way: str, first: int) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        for step in range(first):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        WAYS[way](model, rank, first)
        with pytest.raises(RuntimeError, match=NOT_AVERAGED.format(rank) + r".*reducer\.reduce\(\)"):
            optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def update_by_hand(model: nn.Module, rank: int, step: int) -> None:
    """Take a step of SGD without an optimizer."""
    params = list(model.parameters())
    grads = torch.autograd.grad(loss_of(model, rank, step), params)
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param.sub_(0.1 * grad)


@pytest.mark.behavior(
    "Gradients",
    "`... no backward() or reduce() of all ranks has averaged any: ...`",
    "You update by `param.sub_(...)`. Write `.grad` and call `reduce()`. Local updates belong in `paused()`.",
)
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@on_ranks(2)
def test_updates_by_hand_with_local_gradients_are_an_error(ranks: tuple[int, ...]) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)

    def run() -> None:
        for step in range(8):
            if rank in ranks and step > 1:
                update_by_hand(model, rank, step)
            else:
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()

    with attached(optimizer, model):
        with pytest.raises(RuntimeError, match=r"rank [01].*no backward\(\) or reduce\(\) of all ranks has averaged"):
            run()


@on_ranks(2)
def test_updates_by_hand_with_averages_and_paused_ones_are_right() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        for step in range(8):
            before = [p.detach().clone() for p in model.parameters()]
            with reducer.paused():
                for number in range(8):
                    update_by_hand(model, rank, number)
            with torch.no_grad():
                for param, value in zip(model.parameters(), before, strict=True):
                    param.copy_(value)
            by_hand(model, rank, step)
            reducer.reduce()
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    param.sub_(0.1 * param.grad)
        assert_replicas_equal(model)


def one_of_them(how: str) -> None:
    """Make a mistake on rank 1 only; it is told, and so is rank 0, by its next backward."""
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)

    def run() -> None:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            if rank == 1 and step == 2:
                optimizer.step()

    with over(how), attached(optimizer, model):
        with pytest.raises((RuntimeError, ValueError), match="rank 1.*has not been averaged"):
            run()


@pytest.mark.behavior("Gradients", "step twice on the same averages", "Error, at once also on the other ranks.")
@pytest.mark.parametrize("how", ["shared_memory", "tcp", "torch"])
@on_ranks(2, fresh=True)
def test_two_steps_on_one_rank(how: str) -> None:
    one_of_them(how)


@on_ranks(2)
def test_a_head_that_no_forward_showed() -> None:
    """``model.encode(x)`` in place of ``model(x)``: no hook of the module sees the new layer."""
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        model.append(nn.Linear(5, 3).double())
        optimizer.add_param_group({"params": list(model[5].parameters())})
        x = batch_of(rank, 0)[0]
        model[5](model[:5](x).detach()).square().sum().backward()
        with pytest.raises(RuntimeError, match=NOT_AVERAGED.format(rank) + ": pycomm does not know"):
            optimizer.step()


@on_ranks(2)
def test_zeros_are_no_mistake() -> None:
    """Distributed checkpointing steps on zeros to create state, before any backward."""
    rank, model = dist.get_rank(), make_model()
    optimizer = torch.optim.Adam(model.parameters(), 0.0)
    with attached(optimizer, model):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()


class OwnStep(torch.optim.SGD):
    """Optimizer whose step calls that of its base class: both have torch's hooks."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("closure", [False, True])
@on_ranks(2)
def test_steps_inside_one_another(closure: bool) -> None:
    rank, model = dist.get_rank(), make_model()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)  # torch gives a class's step its hooks at its first instance
    optimizer = OwnStep(model.parameters(), 0.1)
    with attached(optimizer, model) as reducer:
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            optimizer.step((lambda loss=loss: loss) if closure else None)
        assert reducer.stats()["steps"] == 3
        assert_replicas_equal(model)


@on_ranks(2)
def test_what_is_done_to_an_average_stays_allowed() -> None:
    """Clipping by value, decay added to it, another tensor in its place: equal on all ranks."""
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad.clamp_(-0.01, 0.01)
                param.grad = param.grad + 0.1 * param.detach()
            optimizer.step()
        assert_replicas_equal(model)


# reduce()

METHODS = [None, pycomm.FP16(), pycomm.TopK(1.0), pycomm.Int8(), pycomm.PowerSGD(2)]


@pytest.mark.pairwise
@pytest.mark.parametrize("compression", [None, pycomm.TopK(1.0)], ids=repr)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, 3)
def test_reduce_averages_what_was_written(way: str, compression: Any) -> None:
    rank, model, plain = dist.get_rank(), make_model(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=compression) as reducer:
        for step in range(4):
            plain.load_state_dict(model.state_dict())
            wanted = average_gradients(plain, losses_at(step))
            optimizer.zero_grad()
            WAYS[way](model, rank, step)
            reducer.reduce()
            for name, param in model.named_parameters():
                close(param.grad, wanted[name], 1e-9)
            optimizer.step()
        assert reducer.stats()["steps"] == 4
        assert_replicas_equal(model)


@pytest.mark.parametrize("compression", METHODS, ids=repr)
@on_ranks(2)
def test_reduce_is_what_backward_does(compression: Any) -> None:
    """To the bit, state of compression included; one rank may even call the other."""
    rank = dist.get_rank()
    results = []
    for reduces in ([], [0], [0, 1]):
        model = make_model(dtype=torch.float32)
        optimizer = sgd(model)
        with attached(optimizer, model, compression=compression) as reducer:
            for step in range(5):
                optimizer.zero_grad()
                if rank in reduces:
                    by_hand(model, rank, step)
                    reducer.reduce()
                else:
                    loss_of(model, rank, step).backward()
                optimizer.step()
            state = own_state(reducer)
        results.append(([p.detach() for p in model.parameters()], state))
    for params, state in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(params, results[0][0], strict=True))
        for name, entry in results[0][1].items():
            assert all(torch.equal(state[name][key], tensor) for key, tensor in entry.items())


@on_ranks(2)
def test_reduce_with_everything_frozen() -> None:
    """Evolution strategies: no backward at all, and no parameter that requires gradients."""
    rank, model = dist.get_rank(), make_model()
    model.requires_grad_(False)
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        for step in range(3):
            optimizer.zero_grad()
            for param in model.parameters():
                param.grad = torch.full_like(param, float(rank + step))
            if step == 2:
                with pytest.raises(RuntimeError, match=NOT_AVERAGED.format(rank)):
                    optimizer.step()
                return
            reducer.reduce()
            assert all(bool((p.grad == step + 0.5).all()) for p in model.parameters() if p.grad is not None)
            optimizer.step()
            assert_replicas_equal(model)


@on_ranks(2)
def test_frozen_parameters_written_on_one_rank_only() -> None:
    rank, model = dist.get_rank(), make_model()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        by_hand_of = model[2:]
        for param in by_hand_of.parameters():
            param.grad = torch.ones_like(param)
        if rank == 1:
            model[0].weight.grad = torch.ones_like(model[0].weight)
        with pytest.raises(RuntimeError, match="new parameter, '0.weight', on rank 1"):
            reducer.reduce()


@on_ranks(2)
def test_reduce_ends_a_window() -> None:
    rank, model, plain = dist.get_rank(), make_model(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, accumulate=4) as reducer:
        for step in range(3):
            plain.load_state_dict(model.state_dict())
            wanted = [average_gradients(plain, losses_at(2 * step + i)) for i in (0, 1)]
            optimizer.zero_grad()
            loss_of(model, rank, 2 * step).backward()
            loss_of(model, rank, 2 * step + 1).backward()
            reducer.reduce()
            for name, param in model.named_parameters():
                close(param.grad, wanted[0][name] + wanted[1][name], 1e-9)
            optimizer.step()
        assert_replicas_equal(model)


@pytest.mark.parametrize("own", [True, False])
@on_ranks(2)
def test_reduce_with_a_scaler(own: bool) -> None:
    rank, model, plain = dist.get_rank(), make_model(dtype=torch.float32), make_model(dtype=torch.float32)
    optimizer = sgd(model)
    scaler: Any = pycomm.LossScaler(2.0**10) if own else torch.amp.GradScaler("cpu", 2.0**10)
    with attached(optimizer, model, loss_scaler=scaler, compression=pycomm.TopK(1.0)) as reducer:
        for step in range(3):
            plain.load_state_dict(model.state_dict())
            wanted = average_gradients(plain, losses_at(step))
            optimizer.zero_grad()
            params = list(model.parameters())
            scaled = scaler.scale(loss_of(model, rank, step))
            for param, grad in zip(params, torch.autograd.grad(scaled, params), strict=True):
                param.grad = grad
            reducer.reduce()
            scaler.unscale_(optimizer)
            for name, param in model.named_parameters():
                close(param.grad, wanted[name], 1e-5)
            scaler.step(optimizer)
            scaler.update()
        assert_replicas_equal(model)


@on_ranks(2)
def test_reduce_inside_backward_is_an_error() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        loss = loss_of(model, rank, 0)
        loss.register_hook(lambda _: reducer.reduce())
        with pytest.raises(RuntimeError, match=r"reduce\(\) inside backward\(\)"):
            loss.backward()
        optimizer.zero_grad()
        loss_of(model, rank, 0).backward()
        optimizer.step()
        assert_replicas_equal(model)


@pytest.mark.parametrize("options", [{"average": False}, {"compression": pycomm.TopK(0.5)}], ids=["sum", "topk"])
@on_ranks(2)
def test_reduce_of_averages_is_an_error(options: dict[str, Any]) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, **options) as reducer:
        loss_of(model, rank, 0).backward()
        with pytest.raises(RuntimeError, match=r"reduce\(\) would average the gradient of '0.weight' again"):
            reducer.reduce()
        optimizer.step()
        assert_replicas_equal(model)


def test_one_process_needs_nothing() -> None:
    model = make_model()
    optimizer = sgd(model)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with attached(optimizer, model) as reducer:
            by_hand(model, 0, 0)
            reducer.reduce()
            optimizer.step()
            optimizer.step()
    finally:
        dist.destroy_process_group()


def leave_with(how: str) -> None:
    """End training on rank 1 after three steps; rank 0 goes on, and is told at once who has ended and when."""
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with over(how):
        reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=50))
    for step in range(4):
        if rank == 1 and step == 3:
            reducer.detach()
            return
        optimizer.zero_grad()
        if step < 3:
            loss_of(model, rank, step).backward()
            optimizer.step()
            continue
        with pytest.raises(
            pycomm.CommError, match="rank 1.*ended its training.*after step 3.*in reduction 4"
        ) as caught:
            loss_of(model, rank, step).backward()
        assert caught.value.peer == 1
        assert caught.value.elapsed < 20
    reducer.detach()


@pytest.mark.behavior(
    "Ranks that differ", "end the training, or detach, on one rank", "`CommError` at once on ranks that wait for it."
)
@pytest.mark.parametrize("how", ["shared_memory", "tcp"])
def test_a_rank_that_detaches_is_named_at_once(how: str, new_ranks: Any) -> None:
    ranks: RankPool = new_ranks(2)
    ranks.run(leave_with, how)


def train_in_a_function(steps: int) -> None:
    """Train, and keep nothing."""
    model = make_model()
    optimizer = sgd(model)
    pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=50))
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()


def leave_the_function() -> None:
    """Rank 1 comes back from its training first, and waits elsewhere; its objects are in circles."""
    if dist.get_rank() == 1:
        train_in_a_function(3)
        dist.barrier()
        return
    began = time.monotonic()
    with pytest.raises(
        pycomm.CommError, match="rank 1.*ended its training.*optimizer and model are gone.*after step 3"
    ):
        train_in_a_function(4)
    assert time.monotonic() - began < 11
    dist.barrier()


def test_a_rank_whose_training_is_garbage_is_named_soon(new_ranks: Any) -> None:
    ranks: RankPool = new_ranks(2)
    ranks.run(leave_the_function)


@pytest.mark.behavior(
    "Gradients",
    "step attached parameters with another optimizer",
    "Error on gradients that were not averaged, unless the pass was inside `paused()`.",
)
@pytest.mark.parametrize("way", ["autograd", "backward", "reduce", "paused"])
@on_ranks(2)
def test_another_optimizer_over_attached_parameters(way: str) -> None:
    """It may step on averages, and on what a paused pass has left."""
    rank, model = dist.get_rank(), make_model()
    other = sgd(model)
    with attached(sgd(model), model) as reducer:
        for step in range(3):
            other.zero_grad()
            if way in ("autograd", "reduce"):
                by_hand(model, rank, step)
            elif way == "backward":
                loss_of(model, rank, step).backward()
            else:
                with reducer.paused():
                    loss_of(model, rank, step).backward()
            if way == "reduce":
                reducer.reduce()
            if way == "autograd":
                with pytest.raises(RuntimeError, match="'0.weight' has not been averaged, and another optimizer"):
                    other.step()
                return
            other.step()
        if way != "paused":
            assert_replicas_equal(model)


@on_ranks(2)
def test_a_reducer_that_is_dropped_watches_no_more() -> None:
    """Also in the midst of another optimizer's step, in which torch goes through the hooks of all optimizers."""
    gc.collect()  # what other tests have left
    before, kept = len(_watches), [make_model()]
    kept.append(sgd(kept[0]))
    pycomm.attach(kept[1], kept[0], tuning=pycomm.Tuning(timeout=30))
    assert len(_watches) == before + 1

    def drop(*_: object) -> None:
        kept.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(drop)
    try:
        sgd(make_model()).step()
    finally:
        handle.remove()
    assert len(_watches) == before
