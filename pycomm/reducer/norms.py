"""Norms of gradients, which also tell whether gradients are finite: a norm is not if any element is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pycomm import kernels
from pycomm.reducer.buckets import BucketInFlight, Slot


def measure(flight: BucketInFlight) -> None:
    """Compute the norms of the gradients that ``flight`` received; runs on the communication thread or stream."""
    flight.squares = kernels.squared_norms(
        flight.bucket.parts(flight.bucket.memory), out=flight.squares, scratch=flight.norm_scratch
    )
    flight.measured = True


def squared_norm(flights: Iterable[BucketInFlight], slots: Iterable[Slot]) -> torch.Tensor:
    """Return the squared norm of all gradients together: a 0-d float64 tensor on their device.

    It is the same on all ranks once the gradients are averaged.
    """
    parts = [flight.squares.sum() for flight in flights if _is_measured(flight) and flight.squares is not None]
    rest = [slot.param.grad for slot in slots if slot.param.grad is not None and not _is_measured(slot.flight)]
    return total([*parts, *([kernels.squared_norms(rest).sum()] if rest else [])])


def _is_measured(flight: BucketInFlight | None) -> bool:
    """Return whether the norms taken on arrival are still those of the gradients."""
    return flight is not None and flight.measured and all(slot.untouched() for slot in flight.slots)


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
