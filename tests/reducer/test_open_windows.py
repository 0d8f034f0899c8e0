"""Windows whose last pass somebody else knows, as trainers do, or whose gradients the script clears."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached, warnings_noted
from tests.reducer.models import average_gradients, close, explode, loss_of, losses_at, make_model, sgd

WINDOWS = [3, 1, 2, 1]
"""Lengths of windows: a ragged one may come at any time."""


@pytest.mark.parametrize("compression", [None, pycomm.TopK(1.0)], ids=repr)
@on_ranks(2)
def test_windows_of_any_length(compression: Any) -> None:
    """Gradients are sent in the pass that is said to be the last, and are averages of all passes of the window."""
    rank = dist.get_rank()
    model, plain = make_model(), make_model()
    optimizer = sgd(model)
    says = {"last": False}
    with attached(optimizer, model, accumulate=lambda: says["last"], compression=compression) as reducer:
        step = 0
        for number, length in enumerate(WINDOWS):
            plain.load_state_dict(model.state_dict())
            wanted: dict[str, Any] = {}
            for index in range(length):
                says["last"] = index == length - 1
                loss_of(model, rank, step).backward()
                assert reducer.stats()["steps"] == number + (index == length - 1)
                for name, grad in average_gradients(plain, losses_at(step)).items():
                    wanted[name] = wanted.get(name, 0) + grad
                step += 1
            for name, param in model.named_parameters():
                close(param.grad, wanted[name], 1e-9)
            optimizer.step()
            optimizer.zero_grad()
        assert_replicas_equal(model)


@pytest.mark.behavior(
    "Passes and steps", "pass a function as `accumulate=`, and step although no pass was the last", "Error."
)
@on_ranks(2)
def test_a_step_without_a_last_pass_is_an_error() -> None:
    rank = dist.get_rank()
    model = make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, accumulate=lambda: False) as reducer:
        loss_of(model, rank, 0).backward()
        says = r"step\(\) after 1 of several \(a function says\) backward passes"
        with pytest.raises(RuntimeError, match=says):
            optimizer.step()
        reducer.flush()
        close(model[0].weight.grad, average_gradients(make_model(), losses_at(0))["0.weight"])
        optimizer.step()


@on_ranks(2)
def test_loss_scalers_end_windows() -> None:
    """A scaler that steps in an open window ends it, as with a number of passes."""
    rank = dist.get_rank()
    model = make_model()
    optimizer, scaler = sgd(model), pycomm.LossScaler(4.0)
    with attached(optimizer, model, accumulate=lambda: False, loss_scaler=scaler):
        scaler.scale(loss_of(model, rank, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert_replicas_equal(model)


def attach_with(numbers: list[Any]) -> None:
    model = make_model()
    given = numbers[dist.get_rank()]
    pycomm.attach(
        sgd(model), model, accumulate=(lambda: True) if given is None else given, tuning=pycomm.Tuning(timeout=30)
    ).detach()


def test_a_function_on_one_rank_and_a_number_on_the_other(two_ranks: RankPool) -> None:
    errors = two_ranks.errors(attach_with, [None, 2])
    assert all(isinstance(error, ValueError) for error in errors)
    assert any("accumulate=several (a function says)" in str(error) for error in errors), errors
    with pytest.raises(AssertionError, match="accumulate is 'often', wanted an int"):
        two_ranks.run(attach_with, ["often", "often"])


def by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def to_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def by_module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = None


CLEARED = [by_optimizer, to_zeros, by_module, by_hand]


@pytest.mark.behavior(
    "Passes and steps",
    "clear gradients in an accumulation window",
    "Its passes are discarded. On some ranks only: error everywhere.",
)
@pytest.mark.parametrize("clear", CLEARED, ids=lambda clear: clear.__name__)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float64),
        ({"compression": pycomm.TopK(1.0)}, torch.float64),
        ({"loss_scaler": pycomm.LossScaler(2.0**8)}, torch.float64),
        ({"weights": True}, torch.float64),
        ({}, torch.bfloat16),
    ],
    ids=["dense", "topk", "scaler", "weights", "half"],
)
@on_ranks(2)
def test_a_window_follows_what_the_script_clears(clear: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """The end of an epoch of six batches leaves a window of four open; the next one begins with cleared gradients."""
    if clear is by_hand and dtype == torch.bfloat16:
        return  # .grad is None while such a window is open, so that nothing can be cleared by hand
    rank, model, plain = dist.get_rank(), make_model(dtype=dtype), make_model(dtype=dtype)
    optimizer, alone = sgd(model), sgd(plain)
    weighted = {**options}.pop("weights", False)
    scaler = options.get("loss_scaler")
    given = {name: value for name, value in options.items() if name != "weights"}
    with warnings_noted([]), attached(optimizer, model, accumulate=4, **given) as reducer:
        for epoch in range(3):
            clear(model, optimizer)
            alone.zero_grad()
            for index in range(6):
                step = 6 * epoch + index
                if weighted:
                    reducer.set_weight(8)
                loss = loss_of(model, rank, step) / (1 if weighted else 4)
                (loss if scaler is None else scaler.scale(loss)).backward()
                torch.stack([loss(plain) / 4 for loss in losses_at(step)]).mean().backward()
                if index == 3:
                    optimizer.step() if scaler is None else scaler.step(optimizer)
                    if scaler is not None:
                        scaler.update()
                    alone.step()
                    clear(model, optimizer)
                    alone.zero_grad()
        assert reducer.stats()["steps"] == 3
    for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        close(p, wanted, 1e-9 if dtype == torch.float64 else 0.05)


@on_ranks(2)
def test_an_exception_in_a_window_that_the_script_clears() -> None:
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)
    with attached(optimizer, model, accumulate=3):
        loss_of(model, rank, 0).backward()
        explode(model)
        model.zero_grad()
        for step in (1, 2, 3):
            loss_of(model, rank, step).backward()
        averages = [average_gradients(make_model(), losses_at(step)) for step in (1, 2, 3)]
        for name, param in model.named_parameters():
            close(param.grad, torch.stack([average[name] for average in averages]).sum(0), 1e-9)
        optimizer.step()


@pytest.mark.behavior(
    "Passes and steps",
    "clear gradients in an accumulation window",
    "Its passes are discarded. On some ranks only: error everywhere.",
)
@pytest.mark.parametrize("clear", CLEARED, ids=lambda clear: clear.__name__)
@on_ranks(2, 3)
def test_gradients_that_one_rank_alone_clears(clear: Any) -> None:
    """All ranks learn of it in the reduction in which they meet."""
    rank, model = dist.get_rank(), make_model()
    optimizer = sgd(model)

    def run() -> None:
        for step in range(8):
            if rank == 1 and step == 2:
                clear(model, optimizer)
            loss_of(model, rank, step).backward()
            if not reducer._state.is_open:
                optimizer.step()
                optimizer.zero_grad()

    with attached(optimizer, model, accumulate=4) as reducer:
        with pytest.raises(RuntimeError, match=r"rank 1 cleared gradients inside an accumulation window \(zero_grad"):
            run()


@on_ranks(2)
def test_a_window_whose_passes_make_no_gradients_is_not_cleared() -> None:
    """Autograd functions may return None for all parameters."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> None:
            return None

    rank, model = dist.get_rank(), nn.Linear(12, 5).double()
    optimizer = sgd(model)
    with attached(optimizer, model, accumulate=3) as reducer:
        for step in range(6):
            x = torch.ones(2, 12, dtype=torch.float64)
            if rank == 1 and step == 0:
                nn.functional.linear(x, Nothing.apply(model.weight), Nothing.apply(model.bias)).sum().backward()
            else:
                model(x).sum().backward()
            if step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
        assert reducer.stats()["steps"] == 2
        assert_replicas_equal(model)
