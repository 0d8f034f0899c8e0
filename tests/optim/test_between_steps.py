"""What users do between the steps of a fused optimizer, whose kernel calls are prepared for as long as nothing changes.

Every case is compared with torch's own steps, or with unfused ones, of which the same is done.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

import pycomm
from pycomm.optim import plans
from tests.optim.stepping import Params, assert_near, fresh_gradients, saved, small_parameters

Build = Callable[[Params], torch.optim.Optimizer]
Change = Callable[[Any, Params], None]

BUILDS: dict[str, Build] = {
    "sgd": lambda params: SGD(params, lr=0.01, momentum=0.9, dampening=0.2),
    "adam": lambda params: Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: AdamW(params, lr=0.01),
    "rmsprop": lambda params: RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda params: Adagrad(params, lr=0.01, lr_decay=0.5),
    "lars": lambda params: pycomm.LARS(params, 1.0, weight_decay=0.1, fused=False),
    "lamb": lambda params: pycomm.LAMB(params, 0.01, weight_decay=0.1, fused=False),
}


def all_params(optimizer: torch.optim.Optimizer) -> Params:
    return [p for group in optimizer.param_groups for p in group["params"]]


def go(build: Build, change: Change, fuse: bool, made: list[plans.StepPlan]) -> tuple[Params, int]:
    """Return the parameters after steps with ``change`` in between, and how many plans were made behind it."""
    params = small_parameters()
    optimizer = build(params)
    if fuse:
        pycomm.fuse(optimizer)
    for step in range(4):
        fresh_gradients(all_params(optimizer), step)
        optimizer.step()
    before = len(made)
    change(optimizer, params)
    for step in range(4, 9):
        fresh_gradients(all_params(optimizer), step)
        optimizer.step()
    return [*params, *all_params(optimizer)], len(made) - before


def nothing(optimizer: Any, params: Params) -> None:
    pass


def other_settings(optimizer: Any, params: Params) -> None:
    optimizer.param_groups[0].update(lr=0.003, weight_decay=0.2, maximize=True)


def load(optimizer: Any, params: Params) -> None:
    optimizer.load_state_dict(saved(optimizer.state_dict()))


def load_in_place_of_other_state(optimizer: Any, params: Params) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for key, value in entry.items():
            if key != "step":
                value.mul_(0.5).abs_()
    optimizer.load_state_dict(state)


def clear_state(optimizer: Any, params: Params) -> None:
    optimizer.state.clear()


def forget_one(optimizer: Any, params: Params) -> None:
    optimizer.state.pop(params[1], None)


def replace_states(optimizer: Any, params: Params) -> None:
    for entry in optimizer.state.values():
        for key in entry:
            entry[key] = entry[key].clone()


def write_states(optimizer: Any, params: Params) -> None:
    for entry in optimizer.state.values():
        for value in entry.values():
            value.mul_(2.0)


def add_group(optimizer: Any, params: Params) -> None:
    optimizer.add_param_group({"params": small_parameters(1), "lr": 0.05})


def append_parameter(optimizer: Any, params: Params) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.linspace(1.0, 2.0, 6, dtype=torch.float64)))


def remove_parameter(optimizer: Any, params: Params) -> None:
    del optimizer.param_groups[0]["params"][2]


def swap_two(optimizer: Any, params: Params) -> None:
    listed = optimizer.param_groups[0]["params"]
    listed[0], listed[1] = listed[1], listed[0]


def replace_parameter(optimizer: Any, params: Params) -> None:
    new = nn.Parameter(torch.full((5, 3), 0.5, dtype=torch.float64))
    optimizer.param_groups[0]["params"][0] = new
    if params[0] in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(params[0])


def swap_data(optimizer: Any, params: Params) -> None:
    for p in params:
        p.data = p.data.clone()


def set_data(optimizer: Any, params: Params) -> None:
    with torch.no_grad():
        params[0].set_(params[0].detach().clone())  # type: ignore[call-overload]


def channels_last(optimizer: Any, params: Params) -> None:
    for p in params:
        if p.dim() == 4:
            p.data = p.data.to(memory_format=torch.channels_last)


CHANGES: dict[Change, bool] = {
    nothing: False,
    other_settings: False,
    write_states: False,
    load: True,
    load_in_place_of_other_state: True,
    clear_state: True,
    forget_one: True,
    replace_states: True,
    add_group: True,
    append_parameter: True,
    remove_parameter: True,
    swap_two: True,
    replace_parameter: True,
    swap_data: True,
    set_data: True,
    channels_last: True,
}
"""By change, whether new kernel calls have to be prepared. Not where there is no state to change."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", BUILDS)
def test_change_between_steps(name: str, change: Change, made: list[plans.StepPlan]) -> None:
    wanted, _ = go(BUILDS[name], change, False, made)
    assert not made
    actual, after = go(BUILDS[name], change, True, made)
    assert_near(actual, wanted, 1e-12)
    if change in (clear_state, forget_one) and name == "sgd":
        assert after == 2  # the first momentum is a step of its own
    elif change is add_group and name == "sgd":
        assert after == 2
    elif change in (append_parameter, replace_parameter) and name == "sgd":
        assert after in (1, 2)
    else:
        assert after == CHANGES[change]
