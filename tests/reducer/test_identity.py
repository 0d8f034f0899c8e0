"""Which objects are trained: copies of an attached module, and parameters that take the place of attached ones."""

from __future__ import annotations

import contextlib
import copy
import resource
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import pycomm
from tests.on_ranks import on_ranks
from tests.reducer.attaching import assert_replicas_equal, attached, own_state
from tests.reducer.models import average_gradients, batch_of, close, loss_of, losses_at, make_model, sgd

# Copies

COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "train a `deepcopy` of an attached module",
    "Error before its step. Attach the copy, or train it inside `paused()`.",
)
@pytest.mark.parametrize("drop", [False, True], ids=["original lives", "original is gone"])
@pytest.mark.parametrize("how", COPIES)
@on_ranks(2)
def test_training_a_copy_is_an_error(how: str, drop: bool) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    reducer = pycomm.attach(optimizer, model, tuning=pycomm.Tuning(timeout=30))
    copied = COPIES[how](model)
    if drop:
        reducer.detach()
        del model, optimizer, reducer
    own = sgd(copied)
    loss_of(copied, rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"belongs to a copy .*: call attach\(\)"):
        own.step()


def by_autograd(model: nn.Module, rank: int) -> None:
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(model, rank, 0), params), strict=True):
        param.grad = grad


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


UNSEEN: dict[str, Callable[[nn.Module, int], None]] = {
    "eval mode": lambda model, rank: loss_of(model.eval(), rank, 0).backward(),
    "compiled": lambda model, rank: loss_of(compiled(model), rank, 0).backward(),
    "autograd.grad": by_autograd,
    "a part": lambda model, rank: loss_of(nn.Sequential(*model.children()), rank, 0).backward(),
}


@pytest.mark.parametrize("how", UNSEEN)
@on_ranks(2)
def test_stepping_a_copy_whose_forward_nobody_saw_is_an_error(how: str) -> None:
    rank, model = dist.get_rank(), make_model()
    with attached(sgd(model), model) as reducer:
        copied = copy.deepcopy(model)
        before = [p.detach().clone() for p in copied.parameters()]
        optimizer = sgd(copied)
        with pytest.raises(RuntimeError, match=r"belongs to a copy .*: call attach\(\)"):  # noqa: PT012  # or in backward
            UNSEEN[how](copied, rank)
            optimizer.step()
        assert all(map(torch.equal, before, copied.parameters()))
        alone = copy.deepcopy(model)
        with reducer.paused():
            UNSEEN[how](alone, rank)
        sgd(alone).step()  # each rank by itself, as it was asked for
        with attached(optimizer, copied):
            optimizer.zero_grad()
            loss_of(copied.train(), rank, 0).backward()
            optimizer.step()
            assert_replicas_equal(copied)


@on_ranks(2)
def test_an_optimizer_that_gets_a_copys_parameters_later() -> None:
    """An optimizer that had none is looked at again."""
    rank, model = dist.get_rank(), make_model()
    with attached(sgd(model), model):
        first, own = copy.deepcopy(model), nn.Linear(2, 2)
        optimizer = sgd(own)
        optimizer.step()
        by_autograd(first, rank)
        optimizer.add_param_group({"params": list(first.parameters())})
        with pytest.raises(RuntimeError, match="belongs to a copy"):
            optimizer.step()
        other = sgd(own)
        other.step()
        second = copy.deepcopy(model)
        by_autograd(second, rank)
        other.param_groups[0]["params"] = list(second.parameters())[: len(list(own.parameters()))]
        with pytest.raises(RuntimeError, match="belongs to a copy"):
            other.step()


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "train a `deepcopy` of an attached module",
    "Error before its step. Attach the copy, or train it inside `paused()`.",
)
@on_ranks(2)
def test_copies_that_are_attached_or_need_no_average() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model) as reducer:
        copied, wrapped, teacher = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
        with reducer.paused():
            loss_of(copied, rank, 0).backward()
        with torch.no_grad():
            teacher(batch_of(rank, 0)[0])
        loss_of(teacher.eval(), rank, 0)
        copied.zero_grad()
        own = sgd(copied)
        with attached(own, copied):
            for step in range(3):
                own.zero_grad()
                loss_of(copied, rank, step).backward()
                own.step()
            assert_replicas_equal(copied)
        ddp = nn.parallel.DistributedDataParallel(wrapped)
        for step in range(2):
            ddp.zero_grad()
            loss_of(ddp, rank, step).backward()
        average = torch.optim.swa_utils.AveragedModel(model)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                average(batch_of(rank, 0)[0])
        assert_replicas_equal(model)


@on_ranks(2)
def test_a_copy_made_before_attach_is_ones_own() -> None:
    rank, model = dist.get_rank(), make_model()
    copied = copy.deepcopy(model)
    with attached(sgd(model), model):
        loss_of(copied, rank, 0).backward()


def test_a_copy_in_one_process_is_free() -> None:
    model = make_model()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with attached(sgd(model), model):
            copied = copy.deepcopy(model)
            loss_of(copied, 0, 0).backward()
    finally:
        dist.destroy_process_group()
    loss_of(copied, 0, 0).backward()


# Parameters in the place of others


@on_ranks(2)
def test_a_parametrization_that_is_removed() -> None:
    """Its parameters go, and one by another name comes, which only an optimizer that is not attached has."""
    rank, model = dist.get_rank(), make_model()
    weight_norm(model[0])
    with attached(sgd(model), model):
        loss_of(model, rank, 0).backward()
        remove_parametrizations(model[0], "weight")
        with pytest.raises(RuntimeError, match=r"'0.weight' of the module is another object than the one that was"):
            loss_of(model, rank, 1).backward()


@pytest.mark.parametrize("attaches", [True, False])
@on_ranks(2)
def test_a_layer_that_comes_beside(attaches: bool) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_of(model, rank, 0).backward()
        optimizer.step()
        model.append(nn.Linear(5, 5).double())
        with attached(sgd(model[-1]), model[-1]) if attaches else contextlib.nullcontext():
            loss_of(model, rank, 1).backward()
    said = [str(w.message) for w in caught if "get gradients, but are no parameters" in str(w.message)]
    assert len(said) == (not attaches)
    assert attaches or f"'{len(model) - 1}.weight'" in said[0]


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "replace layers, or call `load_state_dict(assign=True)`, and train with another optimizer",
    "Error in backward, or at that optimizer's step.",
)
@pytest.mark.parametrize("whole", [True, False])
@on_ranks(2)
def test_parameters_that_nobody_told_of(whole: bool) -> None:
    """``load_state_dict(assign=True)``, or a layer exchanged, and an optimizer that is not attached."""
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        if whole:
            model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
        else:
            model[2] = nn.Linear(40, 30).double()
        with pytest.raises(RuntimeError, match=r"is another object than the one that was attached .*attach\(\)"):
            loss_of(model, rank, 0).backward()


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "replace layers, or call `load_state_dict(assign=True)`, and train with another optimizer",
    "Error in backward, or at that optimizer's step.",
)
@on_ranks(2)
def test_parameters_that_no_forward_showed() -> None:
    """The model is trained by a method, by another optimizer: its step shows the new parameters."""
    rank, model = dist.get_rank(), make_model()
    with attached(sgd(model), model):
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        other = sgd(model)
        x, _ = batch_of(rank, 0)
        (x @ model[0].weight.T).square().mean().backward()
        with pytest.raises(RuntimeError, match="parameter '0.weight' of the module is another object"):
            other.step()


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "`the new parameter ... had different values on the ranks`",
    "No forward of the module showed it. Initialize it from the same seed.",
)
@pytest.mark.parametrize("differ", [True, False])
@on_ranks(2)
def test_new_parameters_that_differ(differ: bool) -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)

    def step(number: int) -> None:
        x, _ = batch_of(rank, number)
        optimizer.zero_grad()
        nn.functional.linear(x, model[0].weight, model[0].bias).square().mean().backward()
        optimizer.step()

    with attached(optimizer, model):
        step(0)
        torch.manual_seed(rank if differ else 0)
        model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
        optimizer.param_groups[0]["params"] = list(model.parameters())
        if differ:
            with pytest.raises(RuntimeError, match="the new parameter '0.weight' had different values"):
                step(1)
        else:
            step(1)
            assert_replicas_equal(model)


@on_ranks(2)
def test_functional_calls_exchange_parameters_for_a_while() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    x = batch_of(rank, 0)[0]
    with attached(optimizer, model):
        for step in range(3):
            for make in (lambda t: t.detach().clone().requires_grad_(), lambda t: nn.Parameter(t.detach().clone())):
                other = {name: make(p) for name, p in model.named_parameters()}
                torch.func.functional_call(model, other, (x,)).sum().backward()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        assert_replicas_equal(model)


METHODS = [None, pycomm.TopK(1.0), pycomm.DGC(1.0, momentum=0.5)]


@pytest.mark.behavior(
    "Wrappers, copies and parameters",
    "replace all parameters on all ranks (densification)",
    "Rank 0's values count; old state is dropped.",
)
@pytest.mark.parametrize("compression", METHODS, ids=repr)
@on_ranks(2)
def test_all_parameters_replaced(compression: Any) -> None:
    """As in densification: all have other shapes. The optimizer and the module are told."""
    rank = dist.get_rank()
    torch.manual_seed(rank)  # each rank makes its own new values; rank 0's count
    model: Any = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)).double()
    optimizer = sgd(model)
    with attached(optimizer, model, compression=compression) as reducer:
        for step in range(9):
            if step % 3 == 2:
                width = 8 + step
                model[0].weight = nn.Parameter(torch.randn(width, 4, dtype=torch.float64))
                model[1].weight = nn.Parameter(torch.randn(2, width, dtype=torch.float64))
                optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.zero_grad()
            x = batch_of(rank, step)[0][:, :4]
            model(x).square().mean().backward()
            optimizer.step()
            if step > 0:
                assert_replicas_equal(model)
        assert sorted(reducer.named_parameters()) == ["0.weight", "1.weight"]
        if compression is not None:
            state = own_state(reducer)
            assert all(t.shape == p.shape for name, p in model.named_parameters() for t in state[name].values())


@on_ranks(2)
def test_all_replaced_and_no_forward_shows_it() -> None:
    """No hook of pycomm is called then, so the step finds it."""
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model):
        for layer in (model[0], model[2], model[4]):
            layer.weight, layer.bias = nn.Parameter(layer.weight.detach()), nn.Parameter(layer.bias.detach())
        optimizer.param_groups[0]["params"] = list(model.parameters())
        model[:](batch_of(rank, 0)[0]).sum().backward()
        with pytest.raises(RuntimeError, match="the gradient of '0.weight' has not been averaged"):
            optimizer.step()


@pytest.mark.parametrize("compression", [None, pycomm.TopK(1.0)], ids=repr)
@on_ranks(2, 3)
def test_one_parameter_replaced_in_each_step(compression: Any) -> None:
    """Averages stay right, bytes and state do not grow, and what is kept of the others stays."""
    rank, model, plain = dist.get_rank(), make_model(), make_model()
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], 0.1)
    owners = [(layer, key) for layer in (model[0], model[2], model[4]) for key in ("weight", "bias")]
    with attached(optimizer, model, compression=compression) as reducer:
        sent = []
        for step in range(18):
            layer, key = owners[step % 6]
            setattr(layer, key, nn.Parameter(getattr(layer, key).detach().clone()))
            optimizer.param_groups[step % 6]["params"][0] = getattr(layer, key)
            plain.load_state_dict(model.state_dict())
            wanted = average_gradients(plain, losses_at(step))
            optimizer.zero_grad()
            before = reducer.stats()["bytes_sent"]
            loss_of(model, rank, step).backward()
            sent.append(reducer.stats()["bytes_sent"] - before)
            for name, param in model.named_parameters():
                close(param.grad, wanted[name], 1e-9)
            optimizer.step()
        assert len(reducer.named_parameters()) == 6
        assert max(sent[12:]) <= max(sent[6:12])
        assert_replicas_equal(model)


@pytest.mark.slow
@on_ranks(2, timeout=110)
def test_a_thousand_replacements_take_no_memory() -> None:
    rank, model = dist.get_rank(), nn.ParameterList([nn.Parameter(torch.zeros(100, 100)) for _ in range(5)])
    optimizer = torch.optim.SGD([{"params": [p]} for p in model], 0.01)
    peaks = []
    with attached(optimizer, model, compression=pycomm.TopK(0.1)):
        for step in range(1000):
            i = step % 5
            model[i] = nn.Parameter(model[i].detach().clone())
            optimizer.param_groups[i]["params"][0] = model[i]
            optimizer.zero_grad()
            torch.stack([(p + rank + step % 7).square().mean() for p in model]).sum().backward()
            optimizer.step()
            if step in (200, 999):
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 20_000  # KiB


@on_ranks(2)
def test_replaced_on_one_rank_only() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)

    def run() -> None:
        for step in range(4):
            if rank == 1 and step == 2:
                model[2].weight = nn.Parameter(model[2].weight.detach().clone())
                optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    with attached(optimizer, model):
        with pytest.raises(RuntimeError, match="new parameter, '2.weight', on rank 1"):
            run()


@on_ranks(2)
def test_replaced_where_ranks_step_together_is_refused() -> None:
    rank, model = dist.get_rank(), make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attached(optimizer, model, shard="optimizer"):
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        optimizer.param_groups[0]["params"] = list(model.parameters())
        with pytest.raises(RuntimeError, match="'2.weight' of the optimizer has been replaced.*Sharding.'optimizer'"):
            loss_of(model, rank, 0).backward()
