"""State of optimizers in checkpoints: checked before it is loaded, and kept in the dtypes that it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycomm.checkpoint.files import DamagedError
from pycomm.checks import shown
from pycomm.optim.master_state import KEY
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.step_override import stepper_of
from pycomm.reducer import Reducer


def optimizer_state(reducer: Reducer) -> dict[str, Any]:
    """Return the class of the optimizer, the names of its parameters, and its state, by their numbers in that list."""
    optimizer = reducer.optimizer
    averaged = {id(param): name for name, param in reducer.named_parameters().items()}
    names = [averaged.get(id(p)) or reducer.attached.name_of_ignored(p) for p in optimizer_parameters(optimizer)]
    if None in names:
        raise RuntimeError("a parameter was added to the optimizer, and no backward() has used it yet")
    state = dict(optimizer.state_dict())
    state["state"] = dict(sorted(state["state"].items()))  # ranks may have made it in any order
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "names": names,
        "state_dict": state,
    }


def check_optimizer(saved: dict[str, Any], here: dict[str, Any], has_masters: bool) -> None:
    """Raise ValueError if ``saved`` is of another optimizer than ``here``; both are of :func:`optimizer_state`.

    DamagedError if an option of it is of another kind.
    """
    if saved["class"] != here["class"]:
        raise ValueError(f"it was saved with a {saved['class']}, and the optimizer here is a {here['class']}")
    groups, now = ([g["params"] for g in each["state_dict"]["param_groups"]] for each in (saved, here))
    if groups != now:
        sizes, found = [len(group) for group in groups], [len(group) for group in now]
        raise ValueError(f"the optimizer had parameter groups of {sizes} parameters, and has {found} here")
    for group, now_ in zip(saved["state_dict"]["param_groups"], here["state_dict"]["param_groups"], strict=True):
        for key in group.keys() & now_.keys():
            if _kind(group[key]) != _kind(now_[key]) and None not in (_kind(group[key]), _kind(now_[key])):
                raise DamagedError(f"the optimizer's {key} was {shown(group[key])}, and is {shown(now_[key])} here")
    for i, (name, wanted) in enumerate(zip(saved["names"], here["names"], strict=True)):
        if name != wanted:
            raise ValueError(f"parameter {i} of the optimizer was {name!r}, and is {wanted!r} here")
    had_masters = any(KEY in entry for entry in saved["state_dict"]["state"].values())
    has_masters = has_masters and any(KEY in entry for entry in here["state_dict"]["state"].values())
    if had_masters != has_masters:
        there, at_present = ("with", "without") if had_masters else ("without", "with")
        raise ValueError(f"it was saved {there} pycomm.master_weights, and the optimizer here is {at_present}")


def _kind(option: Any) -> str | None:
    """Return what kind of a value an option of an optimizer is; ``None`` for none, and for foreign objects."""
    kinds = ((bool, "flag"), ((int, float, torch.Tensor), "number"), (str, "text"), ((list, tuple), "list"))
    return next((name for kind, name in kinds if isinstance(option, kind)), None)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Callable[[], Any] | None:
    """Load ``state``; return what undoes it, unless there are master weights, which are written over."""
    has_masters = stepper_of(optimizer).has_masters
    old = optimizer.state_dict()
    optimizer.load_state_dict(state)
    if has_masters:
        return None
    # torch casts state to the dtype of its parameter: of half precision, what was float32 must stay so.
    for number, param in enumerate(optimizer_parameters(optimizer)):
        for key, value in state["state"].get(number, {}).items():
            loaded = optimizer.state[param].get(key)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[param][key] = value.to(loaded.device, copy=True)
    return lambda: optimizer.load_state_dict(old)
