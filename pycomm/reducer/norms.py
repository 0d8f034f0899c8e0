"""Norms of gradients, which also tell whether gradients are finite: a norm is not if any element is not.

Norms are always taken of what is in ``.grad`` now. They could be taken while buckets arrive, and kept; but nothing
short of reading the gradients again tells that they are still the same. torch's GradScaler on the CPU, ``.data`` and
numpy's views write without raising the version counter, and to any elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pycomm import kernels
from pycomm.layout import flat_alias
from pycomm.optim.shards import Shards
from pycomm.reducer.buckets import Slot
from pycomm.reducer.partition import StepPartition


def squared_norm_of_parts(slots: Sequence[Slot], partition: StepPartition) -> torch.Tensor:
    """Return the squared norm of all gradients, of which each rank has its own part: as below. Collective."""
    parts = [partition.own_part(slot.param, grad) for slot in slots if (grad := slot.owner.grad) is not None]
    return partition.add_up(_total(parts).view(1))[0]


def squared_norm(slots: Sequence[Slot], shards: Shards) -> torch.Tensor:
    """Return the squared norm of all gradients together: a 0-d float64 tensor on their device.

    It is the same on all ranks once the gradients are averaged. Of gradients that are DTensors it is that of the
    whole: collective over the ranks of ``shards``, if there are any.
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
    """Scale gradients of DTensors, each times ``scale``, down to ``max_norm``, by the norm of the whole of each.

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
            slot.owner.grad = grad * factor  # not in place: autograd may have left the memory to others, too


def _flat(grad: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``grad`` in any order, uncopied if they fill one piece of memory: kernels copy others."""
    alias = flat_alias(grad, grad)
    return grad if alias is None else alias


def _total(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared norm of all ``grads`` together; a float64 zero if there are none."""
    return kernels.squared_norms(grads).sum() if grads else torch.zeros((), dtype=torch.float64)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that brings gradients of ``norm`` to ``max_norm``; the rule and epsilon are torch's."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def narrowed(factor: torch.Tensor, slots: Iterable[Slot]) -> torch.Tensor:
    """Return ``factor`` as float32, unless it is to be multiplied with float64 gradients."""
    return factor if any(slot.param.dtype == torch.float64 for slot in slots) else factor.float()


def first_not_finite(grads: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first gradient that is not finite; ``None`` if all are. Waits for a GPU."""
    if not grads:
        return None
    finite = torch.isfinite(kernels.squared_norms(list(grads.values()))).tolist()
    return next((name for name, is_finite in zip(grads, finite, strict=True) if not is_finite), None)
