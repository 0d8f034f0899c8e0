"""Schedules of learning rate and batch size for large batches: scaling rules, warm-up, growth of the batch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from pycomm.checks import bounded, count
from pycomm.optim.parameters import checked_optimizer


def linear_scaled_lr(base_lr: float, batch_size: int, base_batch_size: int = 256) -> float:
    """Return ``base_lr * batch_size / base_batch_size``: the learning rate scaled with the global batch.

    This is the linear scaling rule of Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1; use
    it with warm-up (section 2.2).

    Args:
        base_lr: the learning rate that was tuned at ``base_batch_size``.
        batch_size: samples per optimizer step, over all ranks.
        base_batch_size: samples per optimizer step, over all ranks, in the run where ``base_lr`` was tuned.

    Raises:
        TypeError, ValueError: an argument is not positive, or a batch size is not an int.
    """
    return _lr(base_lr) * count("batch_size", batch_size, 1) / count("base_batch_size", base_batch_size, 1)


def sqrt_scaled_lr(base_lr: float, batch_size: int, base_batch_size: int = 256) -> float:
    """Return ``base_lr * sqrt(batch_size / base_batch_size)``; arguments and errors as in :func:`linear_scaled_lr`.

    This is the rule of Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks",
    and of LAMB (You et al. 2020, "Large Batch Optimization for Deep Learning", section 4).
    """
    return _lr(base_lr) * math.sqrt(count("batch_size", batch_size, 1) / count("base_batch_size", base_batch_size, 1))


class WarmupLR(LambdaLR):
    """Scheduler for gradual warm-up; call its ``step()`` after every optimizer step.

    Optimizer step s, counted from 0, uses the group's own lr times
    ``start_factor + (1 - start_factor) * s / warmup_steps`` during the warm-up, and the lr itself from step
    ``warmup_steps`` on. The learning rate depends on s alone: other changes to ``group["lr"]`` last until the
    next ``step()``. For a decay afterwards, put both into torch's ``SequentialLR``::

        warmup = pycomm.optim.WarmupLR(optimizer, 500)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90_000 - 500)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [500])

    Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.2, warm up in every iteration of the
    first 5 epochs, starting from the unscaled learning rate, which is a ``start_factor`` of
    ``base_batch_size / batch_size``. The momentum correction of their section 3 is not needed with
    torch.optim.SGD, whose velocity does not contain lr.

    To resume, construct the scheduler first and then load the states of the optimizer (which holds the lr)
    and of the scheduler. To continue with another schedule, pass ``last_epoch`` instead of loading a state.

    Args:
        optimizer: any torch optimizer; its groups may differ in lr, and lr may be a tensor.
        warmup_steps: optimizer steps of the warm-up; 0 for none.
        start_factor: factor at the start of the warm-up; 0 to 1.
        last_epoch: index of the last optimizer step taken, n - 1 after n steps; -1 at the start of a run.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_steps: int,
        *,
        start_factor: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        optimizer = checked_optimizer(optimizer)
        self.warmup_steps = count("warmup_steps", warmup_steps, 0)
        self.start_factor = bounded("start_factor", start_factor, "0 to 1", lambda x: 0 <= x <= 1)
        super().__init__(optimizer, self.factor, count("last_epoch", last_epoch, -1))

    def factor(self, step: int) -> float:
        """Return the factor by which lr is multiplied in optimizer step ``step``."""
        if step < self.warmup_steps:
            return self.start_factor + (1 - self.start_factor) * step / self.warmup_steps
        return 1.0

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rates of the next optimizer step, one for each parameter group."""
        # Floats even if lr is a tensor, which torch would read back from its device in every step.
        self.base_lrs = [float(lr) for lr in self.base_lrs]
        return super().get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the step, learning rates and schedule as plain values, for ``torch.load(weights_only=True)``."""
        own = ("warmup_steps", "start_factor", "lr_lambdas")
        state = {key: value for key, value in LRScheduler.state_dict(self).items() if key not in own}
        return {**state, "schedule": {"warmup_steps": self.warmup_steps, "start_factor": self.start_factor}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the step at which ``state_dict`` was saved.

        Raises:
            ValueError: it is of another schedule or another number of parameter groups; nothing is changed.
        """
        advice = "; for another schedule, construct it with last_epoch"
        _check_state(state_dict, self.state_dict(), "schedule", "WarmupLR", advice)
        state = {key: value for key, value in state_dict.items() if key != "schedule"}
        groups = len(self.optimizer.param_groups)
        for key in ("base_lrs", "_last_lr"):
            if not _are_numbers(state[key]):
                raise ValueError(f"state_dict[{key!r}] is {state[key]!r}, wanted a list of numbers")
        if len(state["base_lrs"]) != groups:
            raise ValueError(f"state_dict has {len(state['base_lrs'])} parameter groups, the optimizer has {groups}")
        if not isinstance(state["last_epoch"], int) or state["last_epoch"] < -1:
            raise ValueError(f"state_dict['last_epoch'] is {state['last_epoch']!r}, wanted an int")
        LRScheduler.load_state_dict(self, state)


class BatchSizeGrowth:
    """Schedule of a batch size that grows by ``factor`` at every milestone, instead of decaying the learning rate.

    Smith et al. 2018, "Don't Decay the Learning Rate, Increase the Batch Size", sections 2 and 3: training
    depends on the noise scale, which is about lr * dataset size / batch size. ``lr_factor`` is the rest of
    the decay, left to the learning rate: 1 as long as the batch may grow and its size is a whole number of
    samples, less once ``maximum`` limits it, so that after r milestones always::

        lr_factor / batch_size == (1 / factor) ** r / initial

    To combine it with :class:`WarmupLR`, which sets the lr in every step::

        optimizer.step()
        scheduler.step()
        growth.step()
        for group in optimizer.param_groups:
            group["lr"] *= growth.lr_factor

    Args:
        initial: samples per optimizer step at the start, over all ranks.
        milestones: optimizer steps, in increasing order, counted from the start of the run.
        factor: above 1; 10 replaces a decay by 0.1.
        maximum: largest batch size; ``None`` for no limit.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(self, initial: int, milestones: Iterable[int], factor: float, maximum: int | None = None) -> None:
        self.initial = count("initial", initial, 1)
        self.milestones = _milestones(milestones)
        self.factor = bounded("factor", factor, "a number above 1", lambda x: 1 < x < math.inf)
        self.maximum = None if maximum is None else count("maximum", maximum, 1)
        if self.maximum is not None and self.maximum < self.initial:
            raise ValueError(f"maximum is {self.maximum}, wanted at least initial = {self.initial}")
        self.steps = 0

    def step(self) -> None:
        """Count one optimizer step."""
        self.steps += 1

    @property
    def batch_size(self) -> int:
        """Number of samples in the next optimizer step, over all ranks."""
        size = round(self._wanted())
        return size if self.maximum is None else min(size, self.maximum)

    @property
    def lr_factor(self) -> float:
        """Factor by which the learning rate must be multiplied in the next optimizer step."""
        # From the actual batch size, to compensate for its rounding as well as for its limit.
        return self.batch_size / self._wanted()

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the arguments as plain values, except ``maximum``, which may change between runs."""
        growth = {"initial": self.initial, "milestones": list(self.milestones), "factor": self.factor}
        return {"steps": self.steps, "growth": growth}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the step at which ``state_dict`` was saved; ``maximum`` may have changed.

        Raises:
            ValueError: it is of a growth with other arguments; nothing is changed.
        """
        _check_state(state_dict, self.state_dict(), "growth", "BatchSizeGrowth")
        try:
            self.steps = count("steps", state_dict["steps"], 0)
        except TypeError as error:
            raise ValueError(f"state_dict: {error}") from None

    def _wanted(self) -> float:
        return float(self.initial * self.factor ** bisect_right(self.milestones, self.steps))


def _check_state(saved: Any, own: dict[str, Any], key: str, kind: str, advice: str = "") -> None:
    """Raise ValueError unless ``saved`` has the keys of ``own``, and under ``key`` the same arguments."""
    missing = [name for name in own if name not in saved] if isinstance(saved, dict) else []
    if not isinstance(saved, dict) or missing or not isinstance(saved[key], dict):
        lacks = f": it has no {missing[0]!r}" if missing else ""
        raise ValueError(f"state_dict is not of a {kind}, wanted what its state_dict() returned{lacks}")
    before, now = saved[key], own[key]
    for name in [*now, *(before.keys() - now.keys())]:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"state_dict was saved with {name} = {before.get(name)}, this {kind} has {now.get(name)}; "
                f"wanted the same{advice}"
            )


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, int | float | torch.Tensor) for item in value)


def _milestones(values: Any) -> tuple[int, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"milestones is {values!r}, wanted a sequence of ints")
    milestones = tuple(count(f"milestones[{i}]", value, 1) for i, value in enumerate(values))
    for i in range(1, len(milestones)):
        if milestones[i] <= milestones[i - 1]:
            raise ValueError(f"milestones[{i}] is {milestones[i]}, wanted more than {milestones[i - 1]} before it")
    return milestones


def _lr(base_lr: float) -> float:
    return bounded("base_lr", base_lr, "a positive number", lambda x: 0 < x < math.inf)
