"""Which Reducer averages which parameters."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pycomm.optim.reducer import Reducer

_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


def register(reducer: Reducer) -> None:
    _reducers.add(reducer)


def forget(reducer: Reducer) -> None:
    _reducers.discard(reducer)


def reducer_of(optimizer: torch.optim.Optimizer) -> Reducer | None:
    """The Reducer that ``optimizer`` is attached to."""
    return next((reducer for reducer in _reducers if reducer.optimizer is optimizer), None)


def refuse_second_attach(names: Mapping[str, torch.Tensor]) -> None:
    """ValueError if a parameter belongs to a Reducer already."""
    for name, param in names.items():
        if any(reducer.knows(param) for reducer in _reducers):
            raise ValueError(f"parameter {name!r} is attached already: detach() the other Reducer first")
