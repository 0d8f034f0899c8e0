"""Clipping of averaged gradients by their norm."""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from pycomm import kernels
from pycomm.optim.loss_scaler import loss_scale_of
from pycomm.optim.shards import locals_of
from pycomm.reducer.buckets import Slot
from pycomm.reducer.norms import clip_factor, narrowed, squared_norm, squared_norm_of_parts
from pycomm.reducer.parameters import ParameterTable


def unscaled_norm(table: ParameterTable, loss_scaler: Any) -> torch.Tensor:
    """Return the norm of all gradients together without the loss scale, as a 0-d float64 tensor on their device.

    It is that of what the next step would use: clipped ones, if they have been clipped since ``backward()``.

    Raises:
        RuntimeError: the scaler leaves gradients of half-precision parameters scaled.
    """
    scale = loss_scale_of(loss_scaler).left_in(table.optimizer)
    return _norm(table) * table.stepper.factor_left() / scale


def _norm(table: ParameterTable) -> torch.Tensor:
    """Return the norm of all gradients together, as they are or, where that is done apart, as they were unscaled."""
    unscaled, partial = table.stepper.unscaled(), table.partial
    if partial is not None:
        partial.reduce_early()
    if unscaled is not None and partial is not None:
        squares = kernels.squared_norms([partial.own_part(param, grad) for param, grad in unscaled.items()])
        return partial.add_up(squares.sum().view(1))[0].sqrt()
    if partial is not None:
        return squared_norm_of_parts(table.slots(), partial).sqrt()
    if unscaled is not None:
        squares = kernels.squared_norms(locals_of(unscaled.values()))
        return table.shards.total(table.shards.add_up(squares, list(unscaled))).sqrt()
    return squared_norm(table.slots(), table.shards).sqrt()


def clip(table: ParameterTable, norm: torch.Tensor, max_norm: float) -> bool:
    """Scale gradients, whose norm is ``norm``, down to ``max_norm``: in the next step if it can do so, else now.

    Returns:
        Whether it is left to the next step.
    """
    factor = narrowed(clip_factor(norm, max_norm), table.slots())
    if table.stepper.leave_factor(factor.float() if table.on_gpu else float(factor)):
        return True
    if table.on_gpu or float(factor) != 1.0:
        torch._foreach_mul_(list(table.gradients().values()), factor)
    return False


class LoneFactor:
    """Factor that is left for a step of a lone rank: dropped where new gradients come before the step.

    With several ranks a reduction drops it. A lone rank has none, and no other hook on its gradients.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table, self._is_left = table, False
        self._handles: WeakKeyDictionary[Slot, RemovableHandle] = WeakKeyDictionary()

    def note(self) -> None:
        """Note that a factor has been left."""
        self._is_left = True
        for slot in self._table.slots():
            if slot not in self._handles:
                register: Any = slot.param.register_post_accumulate_grad_hook
                self._handles[slot] = register(_DropFactor(self))

    def drop(self) -> None:
        """Drop the factor, if one has been left: there is a new gradient."""
        if self._is_left:
            self._is_left = False
            self._table.stepper.drop_factor()

    def remove(self) -> None:
        """Watch no more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


class _DropFactor:
    """Hook of a parameter that does not keep its owner alive."""

    def __init__(self, owner: LoneFactor) -> None:
        self._owner = weakref.ref(owner)

    def __call__(self, _param: torch.Tensor) -> None:
        owner = self._owner()
        if owner is not None:
            owner.drop()
