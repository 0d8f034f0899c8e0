"""Loss scaling in which ranks agree on skipped steps without a message."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from enum import Enum, auto
from typing import Any

import torch

from pycomm import checks, kernels
from pycomm.optim.attached import reducer_of
from pycomm.optim.parameters import gradients_of, optimizer_parameters, unwrapped
from pycomm.optim.shards import Shards
from pycomm.optim.skips import notify_skip
from pycomm.optim.step_override import Factor, stepper_of

_LEAST_USEFUL = 2.0**-10  # no gradient of a sound model overflows at such a scale


class _Stage(Enum):
    READY = auto()
    UNSCALED = auto()
    STEPPED = auto()


class LossScaler:
    """Scaler of the loss, so that small gradients survive half precision; used like ``torch.amp.GradScaler``::

        scaler = pycomm.LossScaler()
        reducer = pycomm.attach(optimizer, model, loss_scaler=scaler)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)        # only if gradients are to be clipped or inspected
        scaler.step(optimizer)            # skipped on every rank if a gradient is not finite
        scaler.update()

    With ``attach``, all ranks decide from the same averaged gradients whether they are finite, so they agree on
    a skip without a message; only ranks that hold parts of the same DTensors exchange one. If pycomm's
    kernels do the step (:func:`pycomm.fuse`, :func:`pycomm.master_weights`), they divide by the scale inside
    it. An incomplete accumulation window is flushed first (see ``Reducer.flush``; with ``accumulate`` above 1,
    ``unscale_`` and ``step`` are therefore collective). On a GPU, ``step`` waits once, for that decision.

    The scale is halved after a step that was skipped, and doubled after ``growth_interval`` steps in
    a row that were not (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2).
    ``state_dict`` has GradScaler's format.

    Args:
        init_scale: initial scale, a positive number.
        growth_interval: number of consecutive steps after which the scale grows.
        growth_factor, backoff_factor: factors by which it grows, above 1, and shrinks, between 0 and 1.
        dynamic: whether the scale changes at all. A static one still skips steps.
        enabled: ``False`` makes every call behave as if there were no scaler.

    Attributes:
        skipped_steps: number of calls of ``step`` that did not step, since this object was made.

    Raises:
        TypeError, ValueError: a number is out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        dynamic: bool = True,
        enabled: bool = True,
    ) -> None:
        if not (init_scale > 0 and math.isfinite(init_scale)):
            raise ValueError(f"init_scale is {init_scale}, wanted a positive number")
        if not (growth_factor > 1 and math.isfinite(growth_factor)):
            raise ValueError(f"growth_factor is {growth_factor}, wanted a number above 1")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor is {backoff_factor}, wanted a number between 0 and 1")
        self._scale = float(init_scale)
        self._growth_factor, self._backoff_factor = float(growth_factor), float(backoff_factor)
        self._growth_interval = checks.count("growth_interval", growth_interval, 1)
        self._growth_tracker = 0
        self._dynamic, self._enabled = dynamic, enabled
        self._stages: dict[int, tuple[torch.optim.Optimizer, _Stage, bool]] = {}  # by id; the bool: all finite
        self._verdicts: list[bool | None] = []  # of steps; None: a rank vetoed it, which says nothing of the scale
        self._warned = False
        self.skipped_steps = 0

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs``, a tensor or nested iterables of tensors (else TypeError), multiplied by the scale."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, torch.Tensor):
            return outputs * self._scale
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise TypeError(f"outputs is a {type(outputs).__name__}, wanted a tensor or an iterable of tensors")

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer``'s parameters by the scale, in place.

        With :func:`pycomm.master_weights`, half-precision parameters keep their scaled gradients, which
        would underflow; the unscaled ones are in ``.grad`` of ``MasterWeights.parameters()``.

        Raises:
            RuntimeError: called twice, or after ``step``, since the last ``update``.
            ValueError: a gradient is in float16, and there are no master weights.
        """
        if not self._enabled:
            return
        optimizer = unwrapped(optimizer)
        stage = self._stage(optimizer)
        if stage is _Stage.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if stage is _Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        finite = self._is_finite(optimizer)
        stepper = stepper_of(optimizer)
        left = stepper.factor_left()
        if isinstance(left, torch.Tensor) or left != 1.0:
            stepper.leave_factor(1.0)  # raises an error if gradients were written to since clip_grad_norm()
            stepper.drop_factor()
            stepper.unscale(1.0 / self._scale)
            stepper.leave_factor(left)  # for the unscaled gradients
        else:
            stepper.drop_factor()
            stepper.unscale(1.0 / self._scale)
        self._stages[id(optimizer)] = (optimizer, _Stage.UNSCALED, finite)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step(*args, **kwargs)`` with unscaled gradients, unless one is not finite.

        Returns:
            The result of ``optimizer.step``; ``None`` if it was skipped.

        Raises:
            RuntimeError: called twice since the last ``update``, or with a closure.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or args:
            raise RuntimeError("LossScaler.step takes no closure")
        given, optimizer = optimizer, unwrapped(optimizer)
        stage = self._stage(optimizer)
        if stage is _Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        finite = self._is_finite(optimizer) if stage is _Stage.READY else self._stages[id(optimizer)][2]
        self._stages[id(optimizer)] = (optimizer, _Stage.STEPPED, finite)
        reducer = reducer_of(optimizer)
        is_vetoed = reducer is not None and reducer.is_vetoed
        self._verdicts.append(None if is_vetoed else finite)
        stepper = stepper_of(optimizer)
        if not finite:
            self.skipped_steps += 1
            if not is_vetoed:
                self._warn_if_no_overflow(optimizer)
            stepper.forget()
            notify_skip(optimizer)
            return None
        if stage is _Stage.READY and not stepper.leave_factor(1.0 / self._scale):
            stepper.unscale(1.0 / self._scale)
        return given.step(**kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to the outcome of the last steps, or set it to ``new_scale``.

        Raises:
            RuntimeError: there was no ``step`` since the last ``update``.
            ValueError: ``new_scale`` is not a positive number.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            value = float(new_scale)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"new_scale is {value}, wanted a positive number")
            self._scale = value
        else:
            if not self._verdicts:
                raise RuntimeError("no step() since the last update()")
            known = [verdict for verdict in self._verdicts if verdict is not None]
            if self._dynamic and known:
                self._adapt(all(known))
        for optimizer, _, _ in self._stages.values():
            stepper_of(optimizer).forget()
        self._verdicts.clear()
        self._stages.clear()

    def get_scale(self) -> float:
        """Return the scale, which the host knows without waiting, also for a GPU; 1.0 if not enabled."""
        return self._scale if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._growth_factor

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale shrinks."""
        return self._backoff_factor

    def get_growth_interval(self) -> int:
        """Return the number of consecutive steps after which the scale grows."""
        return self._growth_interval

    def is_enabled(self) -> bool:
        """Return whether this scaler does anything."""
        return self._enabled

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``unscale_`` was called on ``optimizer`` in this step, or the scaler is not enabled."""
        return not self._enabled or self._stage(unwrapped(optimizer)) is _Stage.UNSCALED

    def state_dict(self) -> dict[str, Any]:
        """Return the state under GradScaler's keys; an empty dict if not enabled."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state that :meth:`state_dict`, this one's or GradScaler's, returned.

        Raises:
            RuntimeError: the state is empty, such as the state of a scaler that was not enabled.
            ValueError: a key is missing, or its value is not a number.
        """
        if not self._enabled:
            return
        if not isinstance(state_dict, dict):
            raise ValueError(f"the state is a {type(state_dict).__name__}, wanted what state_dict() returned")
        if not state_dict:
            raise RuntimeError("the state is empty: it was saved by a scaler that was not enabled")
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise ValueError(f"the state has no {missing[0]!r}")
        for key in self.state_dict():
            value, least = state_dict[key], 0.0 if key == "_growth_tracker" else math.ulp(0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                raise ValueError(f"the state's {key!r} is {value!r}, wanted a positive number")
        self._scale = float(state_dict["scale"])
        self._growth_factor, self._backoff_factor = state_dict["growth_factor"], state_dict["backoff_factor"]
        self._growth_interval, self._growth_tracker = state_dict["growth_interval"], state_dict["_growth_tracker"]

    def _stage(self, optimizer: torch.optim.Optimizer) -> _Stage:
        return self._stages[id(optimizer)][1] if id(optimizer) in self._stages else _Stage.READY

    def _adapt(self, finite: bool) -> None:
        if not finite:
            self._scale *= self._backoff_factor
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            grown = self._scale * self._growth_factor
            if grown <= torch.finfo(torch.float32).max:
                self._scale = grown
            self._growth_tracker = 0

    def _is_finite(self, optimizer: torch.optim.Optimizer) -> bool:
        reducer = reducer_of(optimizer)
        if reducer is not None:
            return reducer.settle()
        grads, shards = gradients_of(optimizer), Shards(optimizer_parameters(optimizer))
        finite = torch.isfinite(kernels.squared_norms(grads)).all() if grads else torch.tensor(True)
        return bool(shards.all_agree(finite) if shards else finite)

    def _warn_if_no_overflow(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once, naming the source, if gradients are still not finite at a scale so small that none overflows."""
        if self._warned or self._scale > _LEAST_USEFUL:
            return
        self._warned = True
        reducer = reducer_of(optimizer)
        where = None if reducer is None else reducer.name_of_not_finite()
        warnings.warn(
            f"gradients are not finite at a loss scale of {self._scale:g}: this is not an overflow. "
            + (f"The first is in {where}" if where else "Look for NaN in the loss and the parameters"),
            RuntimeWarning,
            stacklevel=3,
        )


def scale_of(scaler: Any, device: torch.device, on_gpu: bool) -> Factor:
    """Return the factor by which ``scaler`` multiplies the loss in the current step; 1 without one.

    ``scaler`` is a LossScaler or has GradScaler's ``scale``. A 0-d float32 tensor on the GPU if only the device knows
    the scale.
    """
    if scaler is None or isinstance(scaler, LossScaler):
        return 1.0 if scaler is None else scaler.get_scale()
    # GradScaler.get_scale() would wait for the GPU; this is the same number, left on the GPU.
    scaled = scaler.scale(torch.ones((), dtype=torch.float32, device=device))
    return scaled.float() if on_gpu else float(scaled)


def scale_left(scaler: Any, optimizer: torch.optim.Optimizer) -> float:
    """Return the factor by which the gradients of ``optimizer`` still have to be divided, as only LossScaler knows."""
    if isinstance(scaler, LossScaler):
        return 1.0 if scaler.is_unscaled(optimizer) else scaler.get_scale()
    if scaler is not None and stepper_of(optimizer).has_masters:
        raise RuntimeError(
            f"with a {type(scaler).__name__} the gradients of half-precision parameters stay scaled: use "
            "pycomm.LossScaler"
        )
    return 1.0


def checked_scaler(loss_scaler: Any) -> Any:
    """Return ``loss_scaler``; raise TypeError if it is neither ``None`` nor has GradScaler's ``scale``."""
    if loss_scaler is not None and not callable(getattr(loss_scaler, "scale", None)):
        raise TypeError(f"loss_scaler is {loss_scaler!r}, wanted an object with GradScaler's scale(tensor), or None")
    return loss_scaler
