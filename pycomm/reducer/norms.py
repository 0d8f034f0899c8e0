"""Norms of gradients, which also tell whether gradients are finite: a norm is not if any element is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pycomm import kernels
from pycomm.optim.shards import Shards
from pycomm.reducer.buckets import BucketInFlight, Slot
from pycomm.reducer.partition import StepPartition


def measure(flight: BucketInFlight) -> None:
    """Compute the norms of the gradients that ``flight`` received; runs on the communication thread or stream."""
    flight.squares = kernels.squared_norms(flight.bucket.own_parts(), out=flight.squares, scratch=flight.norm_scratch)
    flight.measured = True


def squared_norm_of_parts(
    flights: Iterable[BucketInFlight], slots: Sequence[Slot], partition: StepPartition
) -> torch.Tensor:
    """Return the squared norm of all gradients, of which each rank has its own part: as below. Collective."""
    measured = _measured(flights)
    parts = [squares.sum() for squares in measured.values()]
    rest = [
        partition.own_part(slot.param, grad)
        for slot in slots
        if (grad := slot.owner.grad) is not None and id(slot.flight) not in measured
    ]
    mine = total([*parts, *([kernels.squared_norms(rest).sum()] if rest else [])])
    return partition.add_up(mine.view(1))[0]


def squared_norm(flights: Iterable[BucketInFlight], slots: Sequence[Slot], shards: Shards) -> torch.Tensor:
    """Return the squared norm of all gradients together: a 0-d float64 tensor on their device.

    It is the same on all ranks once the gradients are averaged. Of gradients that are DTensors it is that of the
    whole: collective over the ranks of ``shards``, if there are any.
    """
    if shards:
        return shards.total(shards.add_up(_squares_by_slot(slots), [slot.param for slot in slots]))
    measured = _measured(flights)
    parts = [squares.sum() for squares in measured.values()]
    rest = [grad for slot in slots if (grad := slot.owner.grad) is not None and id(slot.flight) not in measured]
    return total([*parts, *([kernels.squared_norms(rest).sum()] if rest else [])])


def _squares_by_slot(slots: Sequence[Slot]) -> torch.Tensor:
    """Return the squared norm of each gradient, or of this rank's part of it; 0 where there is none."""
    if not slots:
        return torch.zeros(0, dtype=torch.float64)
    measured = _measured({id(slot.flight): slot.flight for slot in slots if slot.flight is not None}.values())
    found: dict[int, torch.Tensor] = {}
    rest: dict[int, torch.Tensor] = {}
    for i, slot in enumerate(slots):
        grad = slot.owner.grad
        if grad is not None and id(slot.flight) in measured:
            found[i] = measured[id(slot.flight)][slot.index]
        elif grad is not None:
            rest[i] = grad
    if rest:
        found.update(zip(rest, kernels.squared_norms(list(rest.values())), strict=True))
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


def _measured(flights: Iterable[BucketInFlight]) -> dict[int, torch.Tensor]:
    """Return the norms taken on arrival, by id of the bucket, where they are still those of the gradients."""
    return {
        id(flight): flight.squares
        for flight in flights
        if flight.measured and flight.squares is not None and all(slot.untouched() for slot in flight.slots)
    }


def total(squares: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of 0-d tensors; a float64 zero if there are none."""
    return torch.stack(list(squares)).sum() if squares else torch.zeros((), dtype=torch.float64)


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
