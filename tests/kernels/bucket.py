"""Gradients and what is kept of earlier ones: what accumulate and sparsify are tried on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pycomm import kernels
from tests.kernels.reference import interesting

Move = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Bucket:
    """The arguments of one accumulation."""

    grads: list[Any]
    scale: Any = 0.3
    residual: Any | None = None
    weights: list[Any] | None = None
    clip: float | None = None
    velocity: Any | None = None
    nesterov: bool = False

    decay = 0.05
    momentum = 0.9

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.grads[0].dtype == torch.float64 else torch.float32

    @property
    def size(self) -> int:
        return sum(grad.numel() for grad in self.grads)

    def moved(self, move: Move) -> Bucket:
        """All arrays elsewhere."""

        def maybe(array: Any | None) -> Any | None:
            return None if array is None else move(array)

        return replace(
            self,
            grads=[move(grad) for grad in self.grads],
            residual=maybe(self.residual),
            weights=None if self.weights is None else [move(weight) for weight in self.weights],
            velocity=maybe(self.velocity),
        )

    def options(self, new_velocity: Any) -> dict[str, Any]:
        momentum = kernels.Momentum(new_velocity, self.velocity, self.momentum, self.nesterov)
        return {
            "clip": self.clip,
            "momentum": None if self.velocity is None else momentum,
            "decay": None if self.weights is None else kernels.Decay(self.weights, self.decay),
        }

    def accumulate(self, acc: Any, new_velocity: Any, scratch: kernels.Scratch | None = None) -> Any:
        options = self.options(new_velocity)
        return kernels.accumulate(acc, self.residual, self.grads, self.scale, scratch=scratch, **options)

    def sums(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What acc and the new velocity must be, as csrc/kernels/accumulate.h has it, rounded at every step."""

        def number(value: float) -> torch.Tensor:
            return torch.tensor(value, dtype=self.wide)

        parts = []
        norms = kernels.squared_norms(self.grads).tolist()
        for j, grad in enumerate(self.grads):
            factor = 1.0 if self.clip is None else _quotient(self.clip, abs(self.scale) * math.sqrt(norms[j]))
            factor = torch.tensor(factor).float().item() if factor < 1.0 else 1.0
            part = grad.to(self.wide) * number(self.scale * factor)
            if self.weights is not None:
                part = part + self.weights[j].to(self.wide) * number(self.decay)
            parts.append(part)
        g = torch.cat(parts)
        if self.velocity is None:
            return (g if self.residual is None else self.residual + g), None
        momentum = torch.tensor(self.momentum, dtype=torch.float32).to(self.wide)
        u = momentum * (self.velocity + g) if self.nesterov else momentum * self.velocity + g
        acc = u if self.residual is None else self.residual + u
        return (acc + g if self.nesterov else acc), u


def _quotient(a: float, b: float) -> float:
    return a / b if b != 0.0 else math.inf


KINDS = ("bare", "residual", "weights", "momentum", "nesterov", "momentum alone")
SIZES = [3, 700, 0, 1, 4100, 33, 511, 0, 130, 1, 2]
"""Gradients that begin and end anywhere in a packet, a word of marks and a warp's chunk."""


def bucket(
    sizes: list[int], dtype: torch.dtype, kind: str, seed: int = 1, gap: int = 0, special: bool = False
) -> Bucket:
    """Of one of KINDS; the arrays begin ``gap`` elements into their memory. ``special``: with infs and NaNs."""
    generator = torch.Generator().manual_seed(seed)

    def some(size: int, of_type: torch.dtype) -> torch.Tensor:
        if special:
            return interesting(size + gap, of_type, seed + size)[gap:]
        return torch.randn(size + gap, generator=generator).to(of_type)[gap:]

    grads = [some(size, dtype) for size in sizes]
    made = Bucket(grads)
    total, wide = made.size, made.wide
    return replace(
        made,
        residual=None if kind in ("bare", "momentum alone") else some(total, wide),
        weights=None if kind in ("bare", "residual") else [some(size, dtype) for size in sizes],
        clip=None if kind in ("bare", "momentum alone") else 5.0,
        velocity=some(total, wide) if kind in ("momentum", "nesterov", "momentum alone") else None,
        nesterov=kind == "nesterov",
    )


def flat(size: int, dtype: torch.dtype, gap: int = 0) -> torch.Tensor:
    """Filled with what must not stay."""
    return torch.full((size + gap,), 77.0, dtype=dtype)[gap:]
