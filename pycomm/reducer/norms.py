"""Norms of gradients, and whether they are finite: one question, as a norm is where an element is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pycomm import kernels
from pycomm.reducer.buckets import BucketInFlight, Slot


def measure(flight: BucketInFlight) -> None:
    """Take the norms of what ``flight`` has received, where it received it; on the communication thread, or stream."""
    flight.squares = kernels.squared_norms(
        flight.bucket.parts(flight.bucket.memory), out=flight.squares, scratch=flight.norm_scratch
    )
    flight.measured = True


def squared_norm(flights: Iterable[BucketInFlight], slots: Iterable[Slot]) -> torch.Tensor:
    """Of all gradients together: 0-d float64 on their device, and the same on all ranks once they are averaged."""
    parts = [flight.squares.sum() for flight in flights if _as_measured(flight) and flight.squares is not None]
    rest = [slot.param.grad for slot in slots if slot.param.grad is not None and not _as_measured(slot.flight)]
    return total([*parts, *([kernels.squared_norms(rest).sum()] if rest else [])])


def _as_measured(flight: BucketInFlight | None) -> bool:
    return flight is not None and flight.measured and all(slot.untouched() for slot in flight.slots)


def total(squares: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(squares)).sum() if squares else torch.zeros((), dtype=torch.float64)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of that norm are multiplied with; torch's rule, with its small number against division by zero."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def narrowed(factor: torch.Tensor, slots: Iterable[Slot]) -> torch.Tensor:
    """``factor`` in float32, unless there are float64 gradients to be multiplied with it."""
    return factor if any(slot.param.dtype == torch.float64 for slot in slots) else factor.float()


def first_not_finite(grads: Mapping[str, torch.Tensor]) -> str | None:
    """The name of the first gradient that is not finite. Waits for a GPU."""
    if not grads:
        return None
    finite = torch.isfinite(kernels.squared_norms(list(grads.values()))).tolist()
    return next((name for name, good in zip(grads, finite, strict=True) if not good), None)
