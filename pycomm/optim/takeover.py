"""An optimizer that stays the same object and steps another way.

Only the instance changes: its class, its hooks, its state and its hyperparameters are torch's, and a
copy or a pickle of it is an ordinary optimizer again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

_ATTRIBUTE = "_pycomm_step"


class Takeover:
    """From now on ``optimizer.step()`` calls :meth:`run`, between the optimizer's own hooks.

    Raises:
        RuntimeError: something else has replaced ``step`` already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        before = vars(optimizer).get("step")
        if takeover_of(optimizer) is not None:
            raise RuntimeError(f"the step of this {type(optimizer).__name__} is pycomm's already")
        if before is not None and not hasattr(before, "_wrapped_by_lr_sched"):
            raise RuntimeError(
                f"the step of this {type(optimizer).__name__} has been replaced by {before!r}: let pycomm have it first"
            )
        self._before = before
        scheduled = before is not None

        def step(self_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if scheduled:
                self_._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks for it
            return self.run(closure)

        hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
        hooked.hooked = True  # torch's own mark: unpickling would wrap it again
        vars(optimizer)["step"] = MethodType(hooked, optimizer)
        vars(optimizer)[_ATTRIBUTE] = self

    def run(self, closure: Callable[[], Any] | None) -> Any:
        """One step; returns what ``closure`` does."""
        raise NotImplementedError

    def detach(self) -> None:
        """Give the optimizer its own ``step`` back. Idempotent."""
        if takeover_of(self.optimizer) is not self:
            return
        del vars(self.optimizer)[_ATTRIBUTE]
        if self._before is None:
            del vars(self.optimizer)["step"]
        else:
            vars(self.optimizer)["step"] = self._before


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
