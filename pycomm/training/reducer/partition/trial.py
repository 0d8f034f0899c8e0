"""StepTrial: steps of an optimizer's copy on some of its parameters, compared with steps of all of them."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pycomm.collectives.broadcasting import encode
from pycomm.errors import attempt
from pycomm.optim.parameters import optimizer_parameters
from pycomm.optim.step_override import Factor, own_step

NUM_STEPS = 3
"""Number of steps of a trial: a coupling may have no effect in the first one."""
_MOST_STEPS = 100
"""Number of steps after which it ends even if no update was large enough to show a coupling."""
_VISIBLE = 16
"""Ratio of an update's norm to that of rounding from which a step counts fully: a warm-up may begin with none."""
_COUPLING = 1e-6
"""Most by which an update may change, relative to its norm, if gradients of other parameters change."""
_BATCHING = 0.05
"""Most by which it may change if the others have no gradients: batched products in bfloat16 round differently."""
_OTHERWISE = -1024
"""Ratio of other gradients to the given ones: large enough to exceed the bounds of sums of all gradients."""
_ULPS = 4
_ALONE = "with other gradients of some parameters, or none,"
_COUPLED = ": its step depends on all gradients together"
_KEPT_ELSEWHERE = ", or it keeps a parameter's state elsewhere than in optimizer.state"
_SECONDS = 2.0
"""Most seconds for measuring costs; what was not measured by then keeps its estimate, scaled."""
_REPEATS = 2
_PLAIN = (bool, int, float, str, torch.Tensor)
_OVERRIDES = ("step", "train", "eval", "load_state_dict")
"""Methods that pycomm may have replaced on the optimizer, and that copies have of their class."""


class StepTrial:
    """Trial of whether ``optimizer`` steps ``own`` parameters without the others as it does with them.

    Args:
        own: parameters that a copy of it steps, with the same gradients.
        newcomers: parameters whose gradients may change the step of ``own``, and whose steps count; ``None``: all.

    Attributes:
        copy: the copy that has taken the last step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        own: Sequence[torch.Tensor],
        newcomers: Iterable[torch.Tensor] | None = None,
    ) -> None:
        self.optimizer, self._own = optimizer, list(own)
        self._is_whole = newcomers is None
        self._others = set(optimizer_parameters(optimizer) if newcomers is None else newcomers).difference(own)
        self._counted = set(own if newcomers is None else newcomers)
        self.copy: torch.optim.Optimizer | None = None
        self._num_left, self._num_steps = NUM_STEPS, 0
        self._before: list[torch.Tensor] = []
        self._wanted: list[torch.Tensor] = []  # values of own after the step
        self._kept: dict[torch.Tensor, Any] = {}  # state of newcomers that only other ranks have

    def before_step(self, factor: Factor = 1.0) -> None:
        """Step copies, before the optimizer steps: with all gradients, with others than those of ``own``, with these.

        Raises:
            ValueError: they differ.
            Exception: the step of a copy has raised it.
        """
        with_all = self._stepped_copy(factor, torch.clone)
        whole, others = self._own_of(with_all), [pair for pair in self._pairs(with_all) if pair[0] in self._others]
        kept = {param: with_all.state[copied] for param, copied in others if copied in with_all.state}
        changed = self._own_of(self._stepped_copy(factor, lambda grad: _OTHERWISE * grad.flip(list(range(grad.dim())))))
        self.copy = self._stepped_copy(factor, lambda _: None)
        self._before = [param.detach().clone() for param in self._own]
        self._wanted = [value for value, _ in (whole if self._is_whole else self._own_of(self.copy))]
        triples = zip(self._own, whole, changed, self._own_of(self.copy), strict=True)
        for param, (wanted, entry), (other, other_entry), (alone, alone_entry) in triples:
            change, what = (wanted.double() - param.double()).norm(), f"a parameter of shape {list(param.shape)}"
            if not (_is_near(wanted, other, _COUPLING * change) and _is_near(wanted, alone, _BATCHING * change)):
                raise ValueError(f"{_ALONE} it steps {what} otherwise{_COUPLED}")
            self._compare(entry, other_entry, f"the state of {what}", _COUPLING)
            self._compare(entry, alone_entry, f"the state of {what}", _BATCHING)
        own = set(self._own)
        for param, copied in self._pairs(self.copy):
            is_others = param.grad is not None and param not in own
            if is_others and not torch.allclose(param, copied, rtol=0.0, atol=0.0, equal_nan=True):
                raise ValueError(
                    f"it changes a parameter of shape {list(param.shape)} without a gradient, which another rank steps"
                )
        self._compare_all(with_all, self.copy)
        self._kept = kept

    def _compare_all(self, whole: torch.optim.Optimizer, alone: torch.optim.Optimizer) -> None:
        """Raise ValueError if copies differ in what belongs to no parameter."""
        indices, alone_indices = _indices_of(whole), _indices_of(alone)
        groups = zip(whole.param_groups, alone.param_groups, strict=True)
        for number, (group, alone_group) in enumerate(groups):
            numbers, others = _numbers(group, indices), _numbers(alone_group, alone_indices)
            self._compare(numbers, others, f"group {number} of it", _COUPLING, _KEPT_ELSEWHERE)
        numbers, others = _numbers(_own_values(whole), indices), _numbers(_own_values(alone), alone_indices)
        self._compare(numbers, others, "it", _COUPLING, _KEPT_ELSEWHERE)

    def _pairs(self, made: torch.optim.Optimizer) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters with those of a copy."""
        return zip(optimizer_parameters(self.optimizer), optimizer_parameters(made), strict=True)

    def _stepped_copy(
        self, factor: Factor, of_others: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> torch.optim.Optimizer:
        """Return a copy that has taken a step; gradients of others than ``own`` are what the function returns."""
        made, own = copy_of(self.optimizer), set(self._own)
        for param, copied in self._pairs(made):
            if param in self._kept and param not in self.optimizer.state:
                made.state[copied] = copy.deepcopy(self._kept[param])
            if param.grad is not None and param in own:
                copied.grad = param.grad.detach() * factor
            elif param.grad is not None and param in self._others:
                copied.grad = of_others(param.grad.detach())
        state = self.optimizer.state
        known = list(state)
        with _random_numbers_kept(made):  # the optimizer's own step gets the same ones
            own_step(made, None)
        if len(state) > len(known):
            self.optimizer.state = defaultdict(dict, {key: state[key] for key in known})
            raise ValueError(
                "a copy of it, stepped to try it, writes to its state: a function in an attribute keeps it"
            )
        return made

    def _own_of(self, made: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Return the values of ``own`` in a copy, and the numbers of their state."""
        copies = dict(self._pairs(made))
        return [(copies[p].detach(), _numbers(made.state.get(copies[p], {}), {})) for p in self._own]

    def after_step(self) -> list[bool]:
        """Return whether the optimizer has changed a parameter of ``own``, and visibly one that counts."""
        pairs = list(zip(self._own, self._before, strict=True))
        for (param, before), wanted in zip(pairs, self._wanted, strict=True):
            if not _is_near(param, wanted, _COUPLING * (wanted.double() - before.double()).norm()):
                raise ValueError(
                    f"it has stepped a parameter of shape {list(param.shape)} otherwise than a copy of it just before: "
                    "it keeps state elsewhere than in optimizer.state and its own attributes"
                )
        self._wanted = []
        for param in self._own:
            encoded_state(self.optimizer.state.get(param, {}), [])
        changes = [(param, (param - before).norm()) for param, before in pairs if param in self._counted]
        return [
            any(not torch.equal(param, before) for param, before in pairs),
            any(bool(change > _VISIBLE * _rounding_of(param)) for param, change in changes),
        ]

    def _compare(
        self, numbers: Mapping[str, Any], copied: Mapping[str, Any], what: str, most: float, more: str = ""
    ) -> None:
        for key in (key for key in numbers if key in copied):
            if not _is_close(numbers[key], copied[key], most):
                there, here = _shown(numbers[key]), _shown(copied[key])
                raise ValueError(
                    f"{_ALONE} {what} has {key}={here} after a step, and with these {there}{_COUPLED}{more}"
                )

    def count(self, everyones: Sequence[Sequence[bool]]) -> bool:
        """Count a step, of which each rank passes what :meth:`after_step` returned; return whether more are to come."""
        has_changed, is_visible = map(any, zip(*everyones, strict=True))
        self._num_steps += has_changed
        self._num_left -= is_visible
        return self._num_left > 0 and self._num_steps < _MOST_STEPS


def _rounding_of(value: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = value.double().norm()
    return norm * (_ULPS * torch.finfo(value.dtype).eps)


def _is_near(value: torch.Tensor, other: torch.Tensor, most: torch.Tensor) -> bool:
    """Return whether two tensors differ by no more than the norm ``most``, and rounding."""
    finite = torch.isfinite(value)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    if not bool(finite.all()):
        return bool(torch.equal(value[finite], other[finite]))
    return bool((value.double() - other.double()).norm() <= most + _rounding_of(value))


def _indices_of(optimizer: torch.optim.Optimizer) -> dict[Any, int]:
    return {param: index for index, param in enumerate(optimizer_parameters(optimizer))}


def _own_values(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of ``optimizer``, and of its state what belongs to no parameter."""
    values = {key: value for key, value in vars(optimizer).items() if key != "param_groups"}
    return {**values, "state": {k: v for k, v in optimizer.state.items() if not isinstance(k, torch.Tensor)}}


def _numbers(root: Any, indices: Mapping[Any, int]) -> dict[str, Any]:
    """Return numbers, texts and tensors in ``root`` and all that it contains, except parameters, by their paths.

    In a path, a parameter is its index among ``indices``.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        path, value = left.pop()
        if isinstance(value, _PLAIN):
            found[path] = value
        elif id(value) not in seen and not callable(value):
            seen.add(id(value))
            for key, item in _items_of(value):
                name = str(indices.get(key, "") if isinstance(key, torch.Tensor) else key)
                if not isinstance(item, torch.nn.Parameter) and not name.startswith("_pycomm"):
                    left.append((f"{path}.{name}" if path else name, item))
    return found


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple, deque)) else getattr(value, "__dict__", {}).items()


def _is_close(value: Any, other: Any, most: float) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor) and value.shape == other.shape:
        if value.is_floating_point():
            return _is_near(value, other, most * value.double().norm())
        return torch.equal(value, other)
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=most) or (math.isnan(value) and math.isnan(other))
    return not isinstance(value, torch.Tensor) and not isinstance(other, torch.Tensor) and bool(value == other)


def _shown(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)[:24]


def _gpus_of(optimizer: torch.optim.Optimizer) -> set[torch.device]:
    return {param.device for param in optimizer_parameters(optimizer) if param.is_cuda}


@contextlib.contextmanager
def _random_numbers_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context for steps of ``optimizer`` that do not change which random numbers the script gets."""
    plain, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=_gpus_of(optimizer)):
        yield
    random.setstate(plain)
    np.random.set_state(arrays)


def encoded_state(entry: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state ``entry`` of a parameter, encoded for other ranks; its tensors are appended to ``tensors``."""
    if not isinstance(entry, dict):
        raise ValueError(f"its state of a parameter is a {type(entry).__name__}, wanted a dict")
    for key, value in entry.items():
        if '["own",' in json.dumps(encode(value, []), separators=(",", ":")):
            raise ValueError(f"its state {key!r} of a parameter has a {type(value).__name__}, which cannot be sent")
    return encode(dict(entry), tensors)


def copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of ``optimizer`` with copies of its parameters and state, without hooks."""
    memo: dict[int, Any] = {}
    for param in optimizer_parameters(optimizer):
        copied = torch.nn.Parameter(param.detach().clone(memory_format=torch.preserve_format), param.requires_grad)
        memo[id(param)] = copied
    made = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    for name, value in vars(optimizer).items():
        if name in _OVERRIDES or name.startswith("_pycomm"):
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
        estimates: cost of each parameter in any unit, for those that there is no time to measure.
    """
    made = trial.copy
    assert made is not None
    began = time.monotonic()
    params = [(number, p) for number, group in enumerate(made.param_groups) for p in group["params"]]
    for _, param in params:
        param.grad = None
    with _random_numbers_kept(made):
        nothing = attempt(lambda: _seconds_of_step(made))  # some raise if no parameter has a gradient
        overhead = nothing if isinstance(nothing, float) else 0.0
        seconds: dict[Any, float] = {}
        for (number, param), original in zip(params, optimizer_parameters(trial.optimizer), strict=True):
            key = number, param.shape, param.dtype
            if key in seconds or original.grad is None or time.monotonic() - began > _SECONDS:
                continue
            param.grad = original.grad.detach().clone()
            _seconds_of_step(made)  # makes the state
            seconds[key] = max(min(_seconds_of_step(made) for _ in range(_REPEATS)) - overhead, 1e-7)
            param.grad = None
    keys = [(number, param.shape, param.dtype) for number, param in params]
    known = [(seconds[key], estimate) for key, estimate in zip(keys, estimates, strict=True) if key in seconds]
    unit = sum(time for time, _ in known) / (sum(estimate for _, estimate in known) or 1.0)
    return [seconds.get(key, estimate * (unit or 1.0)) for key, estimate in zip(keys, estimates, strict=True)]


def _seconds_of_step(optimizer: torch.optim.Optimizer) -> float:
    gpus = _gpus_of(optimizer)
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    began = time.perf_counter()
    own_step(optimizer, None)
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return time.perf_counter() - began
