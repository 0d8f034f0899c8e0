"""An optimizer that stays the same object and steps another way.

Only the instance changes: its class, its hooks, its state and its hyperparameters are torch's, and a
copy or a pickle of it is an ordinary optimizer again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch

_ATTRIBUTE = "_pycomm_step"
_steps: WeakSet[Any] = WeakSet()
"""All functions that have ever taken the place of a ``step``."""


class Takeover:
    """From now on ``optimizer.step()`` calls :meth:`run`, between the optimizer's own hooks.

    Raises:
        RuntimeError: something else has replaced ``step`` already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._before = before = vars(optimizer).get("step")
        if takeover_of(optimizer) is not None:
            raise RuntimeError(f"the step of this {type(optimizer).__name__} is pycomm's already")
        if before is not None and not _is_schedulers(before, optimizer):
            raise RuntimeError(
                f"the step of this {type(optimizer).__name__} has been replaced by {before!r}: let pycomm have it first"
            )
        scheduled = before is not None

        def step(self_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if scheduled:
                self_._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks for it
            if takeover_of(self_) is not self:  # detached, inside a wrapper that somebody else has put around this
                return own_step(self_, closure)
            return self.run(closure)

        hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
        if scheduled:
            hooked._wrapped_by_lr_sched = True  # a scheduler warns where its mark is gone
        _steps.add(hooked)
        self._step = vars(optimizer)["step"] = MethodType(hooked, optimizer)
        vars(optimizer)[_ATTRIBUTE] = self

    def run(self, closure: Callable[[], Any] | None) -> Any:
        """One step; returns what ``closure`` does."""
        raise NotImplementedError

    def detach(self) -> None:
        """Give the optimizer its own ``step`` back. Idempotent."""
        if takeover_of(self.optimizer) is not self:
            return
        attributes = vars(self.optimizer)
        del attributes[_ATTRIBUTE]
        if attributes.get("step") is not self._step:
            return  # a scheduler has wrapped it, and watches its wrapper
        if self._before is None:
            del attributes["step"]
        else:
            attributes["step"] = self._before


def _is_schedulers(step: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` is what a scheduler has put around the optimizer's own, to see it called."""
    wrapped = getattr(step, "__wrapped__", None)
    return hasattr(step, "_wrapped_by_lr_sched") and (wrapped is type(optimizer).step or wrapped in _steps)


def own_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
    """A step as the optimizer's class defines it, without hooks, which have run already."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step(optimizer) if closure is None else step(optimizer, closure)


def takeover_of(optimizer: torch.optim.Optimizer) -> Takeover | None:
    """Who steps for ``optimizer``, if not it itself."""
    found: Takeover | None = vars(optimizer).get(_ATTRIBUTE)
    return found


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """What ``closure`` returns, with gradients, as torch's optimizers call it."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
