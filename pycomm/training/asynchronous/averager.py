"""Averager: the common interface of the handles of ``local_sgd`` and ``decoupled_sgd``, and checks of arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from pycomm import checks
from pycomm.compression import Compression, NoCompression
from pycomm.optim.attached import refuse_second_average
from pycomm.optim.parameters import optimizer_parameters
from pycomm.training.asynchronous.loop import Loop
from pycomm.training.cost.named import checked_method, refuse_local_norm


class Averager(ABC):
    """Handle of :func:`local_sgd`, :func:`elastic_averaging` and :func:`decoupled_sgd`. The optimizer keeps it alive.

    Attributes:
        optimizer: ranks meet after its steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, loop: Loop) -> None:
        self.optimizer = optimizer
        self._weight = 1.0
        self._loop, self._is_attached = loop, True
        loop.watch(self._stepped, self._skipped, self._refused)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._description() if self._is_attached else 'detached'})"

    @abstractmethod
    def _description(self) -> str:
        """Return what ``repr`` shows: ranks, parameters and settings."""

    @abstractmethod
    def _stepped(self) -> None:
        """Run after each step."""

    @abstractmethod
    def _skipped(self) -> None:
        """Run when a loss scaler skips a step of this rank."""

    @abstractmethod
    def _refused(self, problem: str) -> None:
        """Report to the waiting ranks that this rank raises an error about its parameters."""

    @property
    @abstractmethod
    def world(self) -> tuple[int, ...]:
        """Ranks that take part, by the numbers that they got when they joined."""

    @abstractmethod
    def meet(self) -> None:
        """Meet now, whatever the number of steps."""

    @abstractmethod
    def take_center(self) -> None:
        """Overwrite the parameters with the common ones."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return counters, among them ``steps``, ``meetings``, ``bytes_sent`` and ``wait_seconds``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, which loads with ``torch.load(weights_only=True)``."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` has returned. The parameters stay as they are: load the model's own state."""

    @abstractmethod
    def _release(self) -> None:
        """Leave the group of ranks, and release shared memory and connections."""

    def set_weight(self, num_samples: float) -> None:
        """Weight this rank by its number of samples or tokens in later meetings. All ranks start with equal weights.

        With :func:`decoupled_sgd` the number is per step.

        Raises:
            TypeError, ValueError: ``num_samples`` is not a positive number.
        """
        self._require_attached()
        self._weight = checks.positive("num_samples", num_samples)

    def detach(self) -> None:
        """End the averaging and release its memory. Idempotent.

        With :func:`decoupled_sgd`, rank 0 waits until all other ranks have detached.

        Raises:
            CommError: another rank did not detach within the timeout.
        """
        if self._is_attached:
            self._is_attached = False
            self._loop.close()
            self._release()

    def skip_step(self) -> None:
        """Skip this step, because its batch cannot be used. Call it in place of the rest of the step.

        The step still counts, so that ranks meet after equally many batches. Steps that a ``pycomm.LossScaler`` or
        torch's ``GradScaler`` skips need no call.
        """
        self._require_attached()
        self._loop.exclude_counts()
        self._skipped()

    def _require_attached(self) -> None:
        if not self._is_attached:
            raise RuntimeError(f"this {type(self).__name__} is detached")


def checked_parameters(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, every: Any, fragments: Any = 1, call: str = "local_sgd()"
) -> dict[str, torch.Tensor]:
    """Return the parameters by name. Raise TypeError or ValueError if these cannot be averaged."""
    checks.count("every", every, 1)
    checks.instance("model", model, torch.nn.Module)
    named: dict[str, torch.Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if checks.count("fragments", fragments, 1) > min(every, len(named)):
        raise ValueError(f"fragments={fragments}, wanted at most every={every} and the {len(named)} parameters")
    refuse_second_average(named, call)
    own = {id(p) for p in optimizer_parameters(optimizer)}
    left = next((name for name, p in named.items() if id(p) not in own), None)
    if left is not None:
        raise ValueError(f"parameter {left!r} does not belong to the optimizer")
    there = {id(p) for p in model.parameters()}
    alone = next((p for p in optimizer_parameters(optimizer) if p.requires_grad and id(p) not in there), None)
    if alone is not None:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(alone.shape)} that is not in the model, so it would not be "
            "averaged: pass a module that has all of them"
        )
    kinds = sorted({f"{p.dtype} on {p.device}" for p in named.values()})
    if len(kinds) != 1 or next(iter(named.values())).dtype not in (torch.float32, torch.float64):
        raise ValueError(f"parameters are {', '.join(kinds)}, wanted all float32 or all float64 on one device")
    return named


def checked_per_rank(per_rank: Any, optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names as a tuple. Raise TypeError or ValueError if they name no numbers of groups."""
    if isinstance(per_rank, str) or not isinstance(per_rank, Iterable):
        raise TypeError(f'per_rank is {per_rank!r}, wanted names of numbers of parameter groups, like ("lr",)')
    names = tuple(per_rank)
    known = {key for group in optimizer.param_groups for key in group} - {"params"}
    for name in names:
        if name not in known:
            raise ValueError(f"per_rank has {name!r}, wanted names out of {', '.join(sorted(known))}")
    return names


SELDOM = "measures many steps, and ranks that meet this seldom have few"


def named_method(compression: Any, why_not_auto: str = SELDOM) -> Compression | None:
    """Return the method; ``None`` for no compression. Raise ValueError for "auto", with the reason."""
    method = checked_method(compression)
    refuse_local_norm(method, "an average over several steps")
    if method.measures:
        raise ValueError(f'compression="auto" {why_not_auto}: name a method')
    return None if isinstance(method, NoCompression) else method


def check_outer(method: Compression | None, outer: Any) -> None:
    """Raise ValueError, which names ``outer``, if ``method`` does not suit the outer optimizer, where there is one."""
    if method is None or not hasattr(outer, "optimizer"):
        return
    try:
        method.check(outer.optimizer([torch.zeros(1)], 1))
    except ValueError as error:
        raise ValueError(f"outer={outer!r}: {error}") from error


def clone_tensors(value: Any) -> Any:
    """Return a state with copies of the tensors in it."""
    if isinstance(value, dict):
        return {key: clone_tensors(each) for key, each in value.items()}
    if isinstance(value, list):
        return [clone_tensors(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
