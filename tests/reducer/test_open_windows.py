"""attach(accumulate=function): windows whose last pass somebody else knows, as trainers do."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import pycomm
from tests.on_ranks import on_ranks
from tests.ranks import RankPool
from tests.reducer.attaching import assert_replicas_equal, attached
from tests.reducer.models import average_gradients, close, loss_of, losses_at, make_model, sgd

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
