"""Which Reducer averages which parameters, and that nobody else does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pycomm.optim.parameters import unwrapped
from pycomm.optim.wrappers import watch_constructions

if TYPE_CHECKING:
    from pycomm.optim.reducer import Reducer

_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()
_watch: list[Any] = []
"""Of wrappers' constructors, while there are Reducers."""


def register(reducer: Reducer) -> None:
    _reducers.add(reducer)
    if not _watch:
        _watch.append(watch_constructions(lambda: list(_reducers)))


def forget(reducer: Reducer) -> None:
    _reducers.discard(reducer)
    if not _reducers:
        while _watch:
            _watch.pop().remove()


def reducer_of(optimizer: torch.optim.Optimizer) -> Reducer | None:
    """The Reducer that ``optimizer`` is attached to."""
    inner = unwrapped(optimizer)
    return next((reducer for reducer in _reducers if reducer.optimizer is inner), None)


def is_covered(param: torch.Tensor) -> bool:
    """Whether some Reducer averages ``param``'s gradient."""
    return any(reducer.knows(param) for reducer in _reducers)


def refuse_second_attach(names: Mapping[str, torch.Tensor]) -> None:
    """ValueError if a parameter belongs to a Reducer already."""
    if any(map(is_covered, names.values())):
        gc.collect()  # it may be of an optimizer that nobody has any more
    for name, param in names.items():
        if is_covered(param):
            raise ValueError(f"parameter {name!r} is attached already: detach() the other Reducer first")
