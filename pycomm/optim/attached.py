"""Registry of Reducers, by which an optimizer finds its own, and a parameter is known to be averaged."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from pycomm.optim.parameters import unwrapped


class Attached(Protocol):
    """Interface that optimizers and loss scalers use of the Reducer that averages their gradients."""

    optimizer: torch.optim.Optimizer

    @property
    def is_vetoed(self) -> bool: ...
    def knows(self, param: torch.Tensor) -> bool: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def settle(self) -> bool: ...
    def name_of_not_finite(self) -> str | None: ...


_reducers: weakref.WeakSet[Attached] = weakref.WeakSet()


def register(reducer: Attached) -> None:
    """Register ``reducer``, to be found by its optimizer and parameters for as long as it lives."""
    _reducers.add(reducer)


def forget(reducer: Attached) -> None:
    """Undo :func:`register`."""
    _reducers.discard(reducer)


def reducer_of(optimizer: torch.optim.Optimizer) -> Attached | None:
    """Return the Reducer that ``optimizer`` is attached to, or ``None``."""
    inner = unwrapped(optimizer)
    return next((reducer for reducer in _reducers if reducer.optimizer is inner), None)


def attached_to(params: Iterable[torch.Tensor]) -> list[Attached]:
    """Return the Reducers that average the gradient of one or more of ``params``."""
    among = list(params)
    return [reducer for reducer in _reducers if any(map(reducer.knows, among))]


def is_covered(param: torch.Tensor) -> bool:
    """Return whether some Reducer averages the gradient of ``param``."""
    return any(reducer.knows(param) for reducer in _reducers)


def refuse_second_attach(names: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if a parameter already belongs to a Reducer."""
    if any(map(is_covered, names.values())):
        gc.collect()  # the Reducer's optimizer may be garbage
    for name, param in names.items():
        if is_covered(param):
            raise ValueError(f"parameter {name!r} is already attached: detach() the other Reducer first")
