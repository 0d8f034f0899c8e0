"""Clipping of averaged gradients by their norm."""

from __future__ import annotations

from typing import Any

import torch

from pycomm import kernels
from pycomm.optim.loss_scaler import loss_scale_of
from pycomm.optim.shards import locals_of
from pycomm.reducer.norms import clip_factor, narrowed, squared_norm, squared_norm_of_parts
from pycomm.reducer.parameters import ParameterTable


def unscaled_norm(table: ParameterTable, loss_scaler: Any) -> torch.Tensor:
    """Return the norm of all gradients together without the loss scale, as a 0-d float64 tensor on their device.

    Raises:
        RuntimeError: the scaler leaves gradients of half-precision parameters scaled.
    """
    scale = loss_scale_of(loss_scaler).left_in(table.optimizer)
    unscaled, partial = table.stepper.unscaled(), table.partial
    if partial is not None:
        partial.reduce_early()
    if unscaled is not None and partial is not None:
        squares = kernels.squared_norms([partial.own_part(param, grad) for param, grad in unscaled.items()])
        return partial.add_up(squares.sum().view(1))[0].sqrt() / scale
    if partial is not None:
        return squared_norm_of_parts(table.flights, table.slots(), partial).sqrt() / scale
    if unscaled is not None:
        squares = kernels.squared_norms(locals_of(unscaled.values()))
        return table.shards.total(table.shards.add_up(squares, list(unscaled))).sqrt() / scale
    return squared_norm(table.flights, table.slots(), table.shards).sqrt() / scale


def clip(table: ParameterTable, norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients, whose norm is ``norm``, down to ``max_norm``: in the next step if it can do so, else now."""
    factor = narrowed(clip_factor(norm, max_norm), table.slots())
    if table.stepper.leave_factor(factor.float() if table.on_gpu else float(factor)):
        return
    if table.on_gpu or float(factor) != 1.0:
        torch._foreach_mul_(list(table.gradients().values()), factor)
