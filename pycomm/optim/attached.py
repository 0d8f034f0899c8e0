"""Registry of Reducers: finds an optimizer's Reducer, and the parameters that are averaged."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol

import torch

from pycomm.optim.parameters import unwrapped


class Refusing(Protocol):
    """Interface of a Reducer to steps that find a mistake."""

    def refuse_gradient(self, param: torch.Tensor, problem: str) -> NoReturn: ...


class Attached(Protocol):
    """Interface of a Reducer to optimizers and loss scalers."""

    optimizer: torch.optim.Optimizer

    @property
    def is_vetoed(self) -> bool: ...
    @property
    def attached(self) -> Refusing: ...
    def knows(self, param: torch.Tensor) -> bool: ...
    def named_parameters(self) -> Mapping[str, torch.Tensor]: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def settle(self) -> bool: ...
    def name_of_not_finite(self) -> str | None: ...


_reducers: weakref.WeakSet[Attached] = weakref.WeakSet()


def register(reducer: Attached) -> None:
    """Register ``reducer``, to be found by its optimizer and parameters for as long as it lives."""
    _reducers.add(reducer)


def forget(reducer: Attached) -> None:
    _reducers.discard(reducer)


def reducer_of(optimizer: torch.optim.Optimizer) -> Attached | None:
    """Return the Reducer that ``optimizer`` is attached to, or ``None``."""
    inner = unwrapped(optimizer)
    return next((reducer for reducer in _reducers if reducer.optimizer is inner), None)


def attached_to(params: Iterable[torch.Tensor]) -> list[Attached]:
    """Return the Reducers that average the gradient of one or more of ``params``."""
    among = list(params)
    return [reducer for reducer in _reducers if any(map(reducer.knows, among))]


def all_attached() -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of all Reducers, with their names."""
    return [pair for reducer in _reducers for pair in reducer.named_parameters().items()]


def is_covered(param: torch.Tensor) -> bool:
    """Return whether some Reducer averages the gradient of ``param``."""
    return any(reducer.knows(param) for reducer in _reducers)


class Averaged(Protocol):
    """Interface of other methods that average parameters, such as local SGD; ``what`` is the public function's name."""

    what: str

    def knows(self, param: torch.Tensor) -> bool: ...


_averaged: weakref.WeakSet[Averaged] = weakref.WeakSet()


def register_averaged(averaged: Averaged) -> None:
    """Register ``averaged``, so that nothing else averages its parameters while it exists."""
    _averaged.add(averaged)


def forget_averaged(averaged: Averaged) -> None:
    _averaged.discard(averaged)


def refuse_second_average(names: Mapping[str, torch.Tensor], call: str) -> None:
    """Raise ValueError if a parameter or its gradient is averaged already; ``call`` names the refused function."""
    if len(_averaged) + len(_reducers) == 0:
        return
    if any(_problem(name, param, call) for name, param in names.items()):
        gc.collect()  # the optimizer of the other one may be garbage
    for name, param in names.items():
        if problem := _problem(name, param, call):
            raise ValueError(problem)


def _problem(name: str, param: torch.Tensor, call: str) -> str:
    other = next((averaged.what for averaged in _averaged if averaged.knows(param)), "")
    if other:
        return f"parameter {name!r} is averaged by {other} already: detach() or close() its handle before {call}"
    if not is_covered(param):
        return ""
    if call == "attach()":
        return f"parameter {name!r} is already attached: detach() the other Reducer first"
    return f"parameter {name!r} is attached, so its gradient is averaged: detach() its Reducer before {call}"
