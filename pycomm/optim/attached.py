"""Registry of what averages gradients: which optimizer is attached, and which parameters are covered."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Protocol

import torch

from pycomm.optim.parameters import unwrapped


class Attached(Protocol):
    """What optimizers and loss scalers need to know of the Reducer that averages their gradients."""

    optimizer: torch.optim.Optimizer

    def knows(self, param: torch.Tensor) -> bool: ...
    def settle(self) -> bool: ...
    def name_of_not_finite(self) -> str | None: ...


_everyone: weakref.WeakSet[Attached] = weakref.WeakSet()


def register(reducer: Attached) -> None:
    """Let ``reducer`` be found by its optimizer and parameters, for as long as it lives."""
    _everyone.add(reducer)


def forget(reducer: Attached) -> None:
    """Undo :func:`register`."""
    _everyone.discard(reducer)


def reducer_of(optimizer: torch.optim.Optimizer) -> Attached | None:
    """Return the Reducer that ``optimizer`` is attached to."""
    inner = unwrapped(optimizer)
    return next((reducer for reducer in _everyone if reducer.optimizer is inner), None)


def is_covered(param: torch.Tensor) -> bool:
    """Return whether some Reducer averages the gradient of ``param``."""
    return any(reducer.knows(param) for reducer in _everyone)


def refuse_second_attach(names: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if a parameter belongs to a Reducer already."""
    if any(map(is_covered, names.values())):
        gc.collect()  # it may be of an optimizer that nobody has any more
    for name, param in names.items():
        if is_covered(param):
            raise ValueError(f"parameter {name!r} is attached already: detach() the other Reducer first")
