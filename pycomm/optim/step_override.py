"""Replacement of an optimizer's ``step`` by one of pycomm's.

Only the instance is changed: its class, hooks, state and hyperparameters remain torch's, and a copy or a
pickle of it is an ordinary optimizer again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch

from pycomm.optim.parameters import gradients_of
from pycomm.torch_internals import replace_step, unhooked_step, wrapped_by_scheduler

_ATTRIBUTE = "_pycomm_step"
_steps: WeakSet[Any] = WeakSet()
"""All functions that have ever replaced a ``step``."""

Factor = float | torch.Tensor
HALF = (torch.float16, torch.bfloat16)


class Stepper:
    """pycomm's interface to an optimizer's step. This base class is for the optimizer's own ``step``.

    Attributes:
        has_masters: whether half-precision parameters have float32 masters.
    """

    has_masters = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def leave_factor(self, factor: Factor) -> bool:
        """Make the next step multiply the gradients by ``factor``; return whether it will."""
        return False

    def factor_left(self) -> Factor:
        """Return the product of the pending factors, by which ``.grad`` is not multiplied yet."""
        return 1.0

    def drop_factor(self) -> None:
        """Drop the pending factors, as the step will not be taken."""

    def forget(self) -> None:
        """Drop all pending state, as the step will not be taken."""

    def masters(self, leaves_out: Callable[[torch.Tensor], bool] = lambda _: False) -> list[torch.Tensor]:
        """Return the masters, updated by writes to their parameters, except masters of parameters to leave out."""
        return []

    def restore(self) -> None:
        """Cast all masters back to their parameters, after the masters were written to."""

    def warn_of_lost_updates(self, names: Mapping[str, torch.Tensor]) -> None:
        """Warn, once, if the optimizer updates half-precision parameters themselves; ``names``: the parameters."""
        name = next((name for name, p in names.items() if p.dtype in HALF and p.requires_grad), None)
        if self.has_masters or name is None or vars(self.optimizer).get("_pycomm_warned"):
            return
        vars(self.optimizer)["_pycomm_warned"] = True
        dtype = names[name].dtype
        warnings.warn(
            f"{type(self.optimizer).__name__} updates parameter {name!r} in {str(dtype).removeprefix('torch.')}: "
            f"updates below about {torch.finfo(dtype).eps:.1g} of a weight are lost. "
            "pycomm.master_weights(optimizer), before attach, keeps float32 masters",
            stacklevel=5,
        )

    def unscale(self, factor: Factor) -> None:
        """Multiply the gradients by ``factor``, in place."""
        grads = gradients_of(self.optimizer)
        if any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError("gradients in float16 would underflow without the scale: see pycomm.master_weights")
        if grads:
            torch._foreach_mul_([grad.data for grad in grads], factor)  # no write that counts: those are the user's

    def unscaled(self) -> dict[torch.Tensor, torch.Tensor] | None:
        """Return the gradients that :meth:`unscale` computed, by parameter; ``None`` if they are in ``.grad``."""
        return None


class StepOverride(Stepper):
    """Override by which ``optimizer.step()`` calls :meth:`run`, between the optimizer's own hooks.

    Raises:
        RuntimeError: ``step`` has already been replaced.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        require_own_step(optimizer)
        self._before = before = vars(optimizer).get("step")

        def step(self_: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
            if step_override_of(self_) is not self:  # detached, but a wrapper around this function still calls it
                return own_step(self_, closure)
            return self.run(closure)

        self._step = replace_step(optimizer, step, under_scheduler=before is not None)
        _steps.add(self._step.__func__)
        vars(optimizer)[_ATTRIBUTE] = self

    def run(self, closure: Callable[[], Any] | None) -> Any:
        """Take one step; return the result of ``closure``."""
        raise NotImplementedError

    def detach(self) -> None:
        """Give the optimizer its own ``step`` back. Idempotent."""
        if step_override_of(self.optimizer) is not self:
            return
        attributes = vars(self.optimizer)
        del attributes[_ATTRIBUTE]
        if attributes.get("step") is not self._step:
            return  # a scheduler has wrapped it, and relies on its wrapper
        if self._before is None:
            del attributes["step"]
        else:
            attributes["step"] = self._before


def require_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if the optimizer's ``step`` has been replaced, other than by a scheduler's wrapper."""
    before = vars(optimizer).get("step")
    if step_override_of(optimizer) is not None:
        raise RuntimeError(f"the step of this {type(optimizer).__name__} has already been replaced by pycomm's")
    wrapped = None if before is None else wrapped_by_scheduler(before)
    if before is not None and (wrapped is None or (wrapped is not type(optimizer).step and wrapped not in _steps)):
        raise RuntimeError(
            f"the step of this {type(optimizer).__name__} has been replaced by {before!r}: call pycomm before that"
        )


def own_step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
    """Take a step as the optimizer's class defines it, without hooks, which have already run."""
    step = unhooked_step(type(optimizer))
    return step(optimizer) if closure is None else step(optimizer, closure)


def step_override_of(optimizer: torch.optim.Optimizer) -> StepOverride | None:
    """Return the override of ``optimizer``'s step, or ``None``."""
    found: StepOverride | None = vars(optimizer).get(_ATTRIBUTE)
    return found


def stepper_of(optimizer: torch.optim.Optimizer) -> Stepper:
    """Return the stepper of ``optimizer``: the override of its step, or one for its own."""
    return step_override_of(optimizer) or Stepper(optimizer)


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Return the result of ``closure``, called with gradients enabled, as torch's optimizers do."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
