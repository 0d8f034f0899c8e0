"""Norms of gradients, and clipping by them.

A norm also shows whether all gradients are finite. It is always computed from the present ``.grad``. It could be cached
as buckets arrive, but only reading the gradients again shows that they are unchanged: torch's GradScaler on
the CPU, ``.data``, and numpy's views write without raising the version counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from pycomm import kernels
from pycomm.collectives.layout import flat_alias
from pycomm.optim.loss_scaler import scale_left
from pycomm.optim.module_hooks import weakly
from pycomm.optim.shards import Shards
from pycomm.torch_internals import local_of
from pycomm.training.reducer.buckets import Slot
from pycomm.training.reducer.parameters import ParameterTable
from pycomm.training.reducer.settings import Options


def squared_norm(slots: Sequence[Slot], shards: Shards) -> torch.Tensor:
    """Return the squared norm of all gradients together: a 0-d float64 tensor on their device.

    It is the same on all ranks once the gradients are averaged. DTensors count as a whole, which is collective over the
    ranks of ``shards``, if there are any.
    """
    if shards:
        return shards.total(shards.add_up(_squares_by_slot(slots), [slot.param for slot in slots]))
    return _total([_flat(grad) for slot in slots if (grad := slot.owner.grad) is not None])


def _squares_by_slot(slots: Sequence[Slot]) -> torch.Tensor:
    """Return the squared norm of each gradient, or of this rank's part of it; 0 where there is none."""
    if not slots:
        return torch.zeros(0, dtype=torch.float64)
    there = {i: _flat(grad) for i, slot in enumerate(slots) if (grad := slot.owner.grad) is not None}
    found = dict(zip(there, kernels.squared_norms(list(there.values())), strict=True)) if there else {}
    zero = torch.zeros((), dtype=torch.float64, device=slots[0].local.device)
    return torch.stack([found.get(i, zero) for i in range(len(slots))])


def clip_parts(slots: Sequence[Slot], shards: Shards, max_norm: float, scale: float | torch.Tensor) -> None:
    """Scale gradients of DTensors, each times ``scale``, down to ``max_norm``, by the norm of the whole tensor.

    A gradient that is not finite is left alone. Collective over the ranks of ``shards``.
    """
    split = [slot for slot in slots if slot.sharded is not None]
    if not split:
        return
    squares = shards.add_up(_squares_by_slot(split), [slot.param for slot in split])
    norms = squares.sqrt() * scale
    factors = torch.where(torch.isfinite(norms), (max_norm / norms).clamp(max=1.0), 1.0).float()
    for slot, factor in zip(split, factors, strict=True):
        if (grad := slot.owner.grad) is not None:
            slot.owner.grad = grad * factor  # not in place: others may use autograd's memory, too


def _flat(grad: torch.Tensor) -> torch.Tensor:
    """Return a flat alias of ``grad`` in memory order if it is dense; otherwise ``grad``, which kernels copy."""
    alias = flat_alias(grad, grad)
    return grad if alias is None else alias


def _total(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared norm of all ``grads`` together; a float64 zero if there are none."""
    return kernels.squared_norms(grads).sum() if grads else torch.zeros((), dtype=torch.float64)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that brings gradients of ``norm`` to ``max_norm``; the rule and epsilon are torch's."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def narrowed(factor: torch.Tensor, slots: Iterable[Slot]) -> torch.Tensor:
    """Return ``factor`` as float32, unless there are float64 gradients."""
    return factor if any(slot.param.dtype == torch.float64 for slot in slots) else factor.float()


def first_not_finite(grads: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first gradient that is not finite; ``None`` if all are. Waits for a GPU."""
    if not grads:
        return None
    finite = torch.isfinite(kernels.squared_norms(list(grads.values()))).tolist()
    return next((name for name, is_finite in zip(grads, finite, strict=True) if not is_finite), None)


def unscaled_norm(table: ParameterTable, settings: Options) -> torch.Tensor:
    """Return the norm of all gradients together without the loss scale, as a 0-d float64 tensor on their device.

    It includes clipping since ``backward()``, as the next step will.
    """
    return _norm(table) * table.stepper.factor_left() / scale_left(settings.loss_scaler, table.optimizer)


def _norm(table: ParameterTable) -> torch.Tensor:
    """Return the norm of all gradients together; of unscaled copies, if the optimizer has them."""
    unscaled, partial = table.stepper.unscaled(), table.partial
    whole = None if table.partition is None else table.partition.whole
    # Once a step of whole parameters has been divided, a rank has only the masters of its own parameters.
    owners = table.partition if unscaled is not None and whole is not None and whole.is_divided else partial
    if owners is not None:
        plain = {slot.param: grad for slot in table.slots() if (grad := slot.owner.grad) is not None}
        grads = plain if unscaled is None else unscaled
        parts = [owners.own_part(param, grad) for param, grad in grads.items()]
        return owners.add_up(_total(parts).view(1))[0].sqrt()
    if unscaled is not None:
        squares = kernels.squared_norms(list(map(local_of, unscaled.values())))
        return table.shards.total(table.shards.add_up(squares, list(unscaled))).sqrt()
    return squared_norm(table.slots(), table.shards).sqrt()


def clip(table: ParameterTable, norm: torch.Tensor, max_norm: float) -> bool:
    """Scale gradients of total norm ``norm`` down to ``max_norm``: in the next step if it can do so, otherwise now.

    Returns:
        Whether the next step will do it.
    """
    factor = narrowed(clip_factor(norm, max_norm), table.slots())
    if table.stepper.leave_factor(factor.float() if table.on_gpu else float(factor)):
        return True
    if table.on_gpu or float(factor) != 1.0:
        torch._foreach_mul_(list(table.gradients().values()), factor)
    return False


class LoneFactor:
    """Clipping factor for the next step of a single rank, dropped if new gradients come before it.

    With several ranks a reduction drops it. A single rank has no reductions, and no other hooks on its gradients.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table, self._is_left = table, False
        self._handles: WeakKeyDictionary[Slot, RemovableHandle] = WeakKeyDictionary()

    def note(self) -> None:
        self._is_left = True
        for slot in self._table.slots():
            if slot not in self._handles:
                register: Any = slot.param.register_post_accumulate_grad_hook
                self._handles[slot] = register(weakly(self.drop))

    def drop(self, *_: Any) -> None:
        """Drop the factor, if one has been left: there is a new gradient."""
        if self._is_left:
            self._is_left = False
            self._table.stepper.drop_factor()

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
