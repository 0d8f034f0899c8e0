"""State of optimizers with masters, as it is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pycomm.optim.step_override import HALF

KEY = "master_weight"
"""Key of the master in a parameter's entry of ``state_dict()``."""


def state_of_optimizer(state_dict: Any) -> dict[str, Any]:
    """Return a shallow copy of ``state_dict``; raise ValueError if that is not an optimizer's."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError("state_dict is not of an optimizer: it has no 'state' and 'param_groups'")
    return dict(state_dict)


def whole_masters(
    masters: Mapping[torch.Tensor, torch.Tensor],
    completed: Callable[[dict[str, Any], torch.Tensor], dict[str, Any]] | None,
) -> dict[torch.Tensor, torch.Tensor]:
    """Return whole masters where parts were kept; made of their parameters, if the other parts are lost (``None``)."""
    if completed is None:
        return {param: param.detach().float() for param in masters}
    return {param: completed({KEY: master}, param)[KEY] for param, master in masters.items()}


def without_masters(
    saved: Mapping[str, Any], params: Sequence[torch.Tensor], masters: Mapping[torch.Tensor, torch.Tensor]
) -> tuple[list[int], dict[int, Any], dict[torch.Tensor, torch.Tensor]]:
    """Return the numbers of saved parameters, their state without the masters, and these, by parameter.

    Raises:
        ValueError: a master is missing, or of another shape.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    found: dict[torch.Tensor, torch.Tensor] = {}
    state = dict(saved["state"])
    for number, param in zip(numbers, params, strict=False):  # torch itself raises if the lengths differ
        if param not in masters:
            continue
        entry = dict(state.get(number, {}))
        if KEY not in entry:
            raise ValueError(
                f"the state of parameter {number} has no {KEY!r}: it was saved without master_weights; load it "
                "before calling master_weights, which then copies the masters from the model's parameters"
            )
        found[param] = entry.pop(KEY)
        if not isinstance(found[param], torch.Tensor):
            raise ValueError(f"the master weight of parameter {number} is a {type(found[param]).__name__}")
        if found[param].shape != param.shape:
            raise ValueError(
                f"the master weight of parameter {number} has shape {list(found[param].shape)}, wanted "
                f"{list(param.shape)}"
            )
        state.pop(number, None)
        if entry:
            state[number] = entry
    return numbers, state, found


def loaded_state(entry: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return the floating-point tensors of ``entry``, except the step count, in float32 on the device of ``param``."""
    return {
        key: value.to(param.device, torch.float32, copy=True)
        for key, value in entry.items()
        if key != "step" and isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def cast_state(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):  # LBFGS keeps its history in lists
        return [cast_state(item, dtype) for item in value]
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, *HALF):
        return value.to(dtype)
    return value
