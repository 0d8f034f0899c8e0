"""StepTrial: steps of an optimizer's copy on some of its parameters, compared with steps of all of them."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.step_override import own_step

NUM_STEPS = 3
"""Number of steps of a trial: a coupling may have no effect in the first one."""
_MOST_OFF = 0.05
"""Largest accepted difference of two updates in units of their norm: batched products in bfloat16 round differently."""
_ULPS = 16
_ALONE = "with the gradients of some parameters only,"
_COUPLED = ": its step depends on all gradients together"
_SECONDS = 2.0
"""Most seconds for measuring costs; what was not measured by then keeps its estimate, scaled."""
_REPEATS = 2
_PLAIN = (bool, int, float, str, torch.Tensor)


class StepTrial:
    """Trial of whether ``optimizer`` steps ``own`` parameters without the others as it does with them.

    Args:
        optimizer: steps all its parameters.
        own: parameters that a copy of it steps, with the same gradients.

    Attributes:
        copy: the copy that has taken the last step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, own: Sequence[torch.Tensor]) -> None:
        self.optimizer, self._own = optimizer, set(own)
        self.copy: torch.optim.Optimizer | None = None
        self._num_left = NUM_STEPS
        self._before: list[torch.Tensor] = []

    def _own_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return this rank's own parameters, each with its copy."""
        assert self.copy is not None
        pairs = zip(optimizer_parameters(self.optimizer), optimizer_parameters(self.copy), strict=True)
        return [(param, copied) for param, copied in pairs if param in self._own]

    def before_step(self) -> None:
        """Step a new copy, before the optimizer steps. Raises what its step raises."""
        self.copy = copy_of(self.optimizer)
        self._before = []
        for param, copied in self._own_pairs():
            copied.grad = None if param.grad is None else param.grad.detach().clone()
            self._before.append(param.detach().clone())
        with _random_numbers_kept():  # the optimizer's own step gets the same ones
            own_step(self.copy, None)

    def after_step(self) -> bool:
        """Compare the copy with the optimizer, which has stepped; return whether a parameter has changed.

        Raises:
            ValueError: they differ.
        """
        assert self.copy is not None
        has_changed = False
        for (param, copied), before in zip(self._own_pairs(), self._before, strict=True):
            has_changed |= not torch.equal(param, before)
            what = f"parameter of shape {list(param.shape)}"
            if not _is_near(param.detach(), copied.detach(), (param.double() - before.double()).norm()):
                raise ValueError(f"{_ALONE} it steps a {what} otherwise{_COUPLED}")
            entry, copied_entry = self.optimizer.state.get(param, {}), self.copy.state.get(copied, {})
            self._compare(_numbers(entry), _numbers(copied_entry), f"the state of a {what}")
        groups = zip(self.optimizer.param_groups, self.copy.param_groups, strict=True)
        for number, (group, copied_group) in enumerate(groups):
            self._compare(_numbers(group), _numbers(copied_group), f"group {number} of it")
        self._compare(_numbers(vars(self.optimizer)), _numbers(vars(self.copy)), "it")
        self._before = []
        return has_changed

    def _compare(self, numbers: Mapping[str, Any], copied: Mapping[str, Any], what: str) -> None:
        for key in numbers.keys() & copied.keys():
            if not _is_close(numbers[key], copied[key]):
                there, here = _shown(numbers[key]), _shown(copied[key])
                raise ValueError(f"{_ALONE} {what} has {key}={here} after a step, and with all {there}{_COUPLED}")

    def count(self, has_changed: bool) -> bool:
        """Count a step in which a rank's parameters have changed; return whether more are to come."""
        self._num_left -= has_changed
        return self._num_left > 0


def _is_near(value: torch.Tensor, copied: torch.Tensor, change: torch.Tensor) -> bool:
    """Return whether two results of a step that moves by the norm ``change`` differ by rounding only."""
    finite = torch.isfinite(value)
    if not torch.equal(finite, torch.isfinite(copied)):
        return False
    if not bool(finite.all()):
        return bool(torch.equal(value[finite], copied[finite]))
    off = (value.double() - copied.double()).norm()
    return bool(off <= _MOST_OFF * change + _ULPS * torch.finfo(value.dtype).eps * value.double().norm())


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers, texts and tensors among the values of ``group``."""
    return {
        key: value
        for key, value in group.items()
        if isinstance(value, _PLAIN) and isinstance(key, str) and not key.startswith("_pycomm")
    }


def _is_close(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.shape == other.shape:
        if value.is_floating_point():
            return _is_near(value, other, value.double().norm())
        return torch.equal(value, other)
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-5) or (math.isnan(value) and math.isnan(other))
    return not isinstance(value, torch.Tensor) and not isinstance(other, torch.Tensor) and bool(value == other)


def _shown(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)[:40]


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Return a context that does not change which random numbers the script gets."""
    plain, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(plain)
    np.random.set_state(arrays)


def copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of ``optimizer`` with copies of its parameters and state, without hooks.

    Raises:
        ValueError: an attribute cannot be copied.
    """
    memo: dict[int, Any] = {}
    for param in optimizer_parameters(optimizer):
        copied = torch.nn.Parameter(param.detach().clone(memory_format=torch.preserve_format), param.requires_grad)
        memo[id(param)] = copied
    made = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("step", "train", "eval") or name.startswith("_pycomm"):
            continue
        if isinstance(value, OrderedDict) and "hooks" in name:
            vars(made)[name] = OrderedDict()
        elif name == "state":
            vars(made)[name] = defaultdict(dict, copy.deepcopy(dict(value), memo))
        else:
            try:
                vars(made)[name] = copy.deepcopy(value, memo)
            except Exception as error:
                raise ValueError(f"its attribute {name!r} cannot be copied to try its step: {error}") from error
    return made


def costs_of(trial: StepTrial, estimates: Sequence[float]) -> list[float]:
    """Return the seconds that a step of each parameter takes, measured on the copy of ``trial``, which is used up.

    One parameter of each shape and dtype in a group is measured, by a step of it alone.

    Args:
        trial: a trial that is over.
        estimates: cost of each parameter in any unit, for those that there is no time to measure.
    """
    made = trial.copy
    assert made is not None
    began = time.monotonic()
    params = [(number, p) for number, group in enumerate(made.param_groups) for p in group["params"]]
    for _, param in params:
        param.grad = None
    with _random_numbers_kept():
        nothing = _seconds_of_step(made)
        seconds: dict[Any, float] = {}
        for (number, param), original in zip(params, optimizer_parameters(trial.optimizer), strict=True):
            key = number, param.shape, param.dtype
            if key in seconds or original.grad is None or time.monotonic() - began > _SECONDS:
                continue
            param.grad = original.grad.detach().clone()
            _seconds_of_step(made)  # makes the state
            seconds[key] = max(min(_seconds_of_step(made) for _ in range(_REPEATS)) - nothing, 1e-7)
            param.grad = None
    keys = [(number, param.shape, param.dtype) for number, param in params]
    known = [(seconds[key], estimate) for key, estimate in zip(keys, estimates, strict=True) if key in seconds]
    unit = sum(time for time, _ in known) / (sum(estimate for _, estimate in known) or 1.0)
    return [seconds.get(key, estimate * (unit or 1.0)) for key, estimate in zip(keys, estimates, strict=True)]


def _seconds_of_step(optimizer: torch.optim.Optimizer) -> float:
    began = time.perf_counter()
    own_step(optimizer, None)
    return time.perf_counter() - began
