"""Parameters and gradients of an optimizer, seen through trainers' proxies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pycomm.torch_internals import local_of, version_of

_TRAINERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
"""Packages whose optimizers are proxies, even if their ``state`` is another object."""


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters of ``optimizer``, in the order of the groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def parameter_ids(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the ids of all parameters, in the same order; fast enough for every step."""
    ids: list[int] = []
    for group in optimizer.param_groups:
        ids.extend(map(id, group["params"]))
    return ids


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside a trainer's proxy (Accelerate's, Lightning's, Fabric's), or ``optimizer`` itself.

    An optimizer that contains another one but has state of its own is not a proxy.
    """
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is optimizer:
            return optimizer
        same = all(getattr(optimizer, name, None) is getattr(inner, name) for name in ("state", "param_groups"))
        if not same and not _is_trainers(optimizer):
            return optimizer
        optimizer = inner


def wrapper_of_unknown_step(optimizer: Any) -> str | None:
    """Return the class of a proxy that is not a known trainer's: its step may do more than the inner optimizer's.

    ``None`` if there is no such proxy. Example: pytorch_optimizer's Magma, which masks what the step has changed.
    """
    while (inner := unwrapped(optimizer)) is not optimizer:
        if not _is_trainers(optimizer):
            return type(optimizer).__name__
        optimizer = getattr(optimizer, "optimizer", inner)
    return None


def _is_trainers(optimizer: object) -> bool:
    return type(optimizer).__module__.split(".")[0] in _TRAINERS


def checked_optimizer(optimizer: Any, model: Any = None, call: str = "") -> torch.optim.Optimizer:
    """Return the user's ``optimizer``, :func:`unwrapped`; every public function with an optimizer begins with this."""
    inner = unwrapped(optimizer)
    swapped = f"; {call}(optimizer, model): swapped?" if isinstance(model, torch.optim.Optimizer) else ""
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(inner).__name__}, wanted a torch.optim.Optimizer{swapped}")
    if not hasattr(inner, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"optimizer is a {type(inner).__name__} whose __init__ has not called torch.optim.Optimizer.__init__, so "
            "it has no hooks: call super().__init__(params, defaults), or pass the optimizer that it wraps. If it "
            "rewrites .grad first (per-sample clipping), do so, and backward(), inside `with reducer.paused():`, then "
            "call reducer.reduce(), and step() of the inner optimizer"
        )
    return inner


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the existing gradients, in the order of the groups; of DTensors, this rank's part."""
    return [local_of(p.grad) for p in optimizer_parameters(optimizer) if p.grad is not None]


_LOOKED_AT = 8
"""Approximate number of parameters whose versions are compared."""


class Writes:
    """Count of changes of ``params``, several between two calls counting as one; a few of them stand for all."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._some = params[:: max(1, len(params) // _LOOKED_AT)]
        self.restart()

    def restart(self) -> None:
        self._number, self._version = 0, self._versions()

    def _versions(self) -> int:
        return sum(map(version_of, self._some))

    def count(self) -> int:
        """Return the number since the last restart if there was a change since the last call, and 0 otherwise."""
        version = self._versions()
        if version == self._version:
            return 0
        self._version = version
        self._number += 1
        return self._number
