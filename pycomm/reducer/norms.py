"""Norms of gradients, and whether they are finite: one question, as a norm is where an element is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from pycomm import kernels
from pycomm.reducer.buckets import Lane, Slot


def measure(lane: Lane) -> None:
    """Take the norms of what ``lane`` has received, where it received it; on the communication thread, or stream."""
    lane.squares = kernels.squared_norms(
        lane.bucket.parts(lane.bucket.memory), out=lane.squares, scratch=lane.norm_scratch
    )
    lane.measured = True


def squared_norm(lanes: Iterable[Lane], slots: Iterable[Slot]) -> torch.Tensor:
    """Of all gradients together: 0-d float64 on their device, and the same on all ranks once they are averaged."""
    parts = [lane.squares.sum() for lane in lanes if _as_measured(lane) and lane.squares is not None]
    rest = [slot.param.grad for slot in slots if slot.param.grad is not None and not _as_measured(slot.lane)]
    return total([*parts, *([kernels.squared_norms(rest).sum()] if rest else [])])


def _as_measured(lane: Lane | None) -> bool:
    return lane is not None and lane.measured and all(slot.untouched() for slot in lane.slots)


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


def require_max_norm(name: str, value: float) -> float:
    """ValueError or TypeError unless it is a positive number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, wanted a number")
    if not value > 0:
        raise ValueError(f"{name} is {value}, wanted a positive number")
    return float(value)
