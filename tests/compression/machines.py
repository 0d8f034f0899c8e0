"""Plain state machines in torch operations, for all ranks at once: what the compressors must do, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from pycomm import DGC

Gradients = list[dict[str, torch.Tensor]]
"""By rank, then by parameter."""


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest magnitudes of x, flat; ties go to the lowest index."""
    return torch.sort(x.flatten().abs(), descending=True, stable=True).indices[:k].sort().values


def gradients_of(params: dict[str, torch.Tensor], size: int, step: int, seed: int = 0) -> Gradients:
    """Make random gradients that every rank can compute for every other; steps are alike, as in training."""
    everyone = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(7919 * seed + 101 * step + rank)
        common = torch.Generator().manual_seed(31 * seed)
        everyone.append(
            {
                name: (torch.randn(p.shape, generator=generator) + 2 * torch.randn(p.shape, generator=common)).to(
                    p.dtype
                )
                for name, p in params.items()
            }
        )
    return everyone


@dataclass
class PlainDGC:
    """Algorithm 1 of the paper with everything around it, in the order of rounding that pycomm documents."""

    method: DGC
    params: dict[str, torch.Tensor]
    size: int
    u: Gradients = field(default_factory=list)
    v: Gradients = field(default_factory=list)
    committed: int = 0
    sent: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Indices sent in the last step, by rank."""

    def __post_init__(self) -> None:
        for state in (self.u, self.v):
            state.extend({n: torch.zeros_like(p) for n, p in self.params.items()} for _ in range(self.size))

    def density(self) -> float:
        config = self.method
        if self.committed >= config.warmup_steps:
            return config.ratio
        return max(
            config.ratio, (0.25, 0.0625, 0.015625, 0.00390625, 0.0009765625)[5 * self.committed // config.warmup_steps]
        )

    def step(self, gradients: Gradients) -> dict[str, torch.Tensor] | None:
        """Return the average, or None if something was not finite: then nothing has happened."""
        if not all(torch.isfinite(g).all() for each in gradients for g in each.values()):
            return None
        average = {name: torch.zeros_like(p) for name, p in self.params.items()}
        self.sent = [{} for _ in range(self.size)]
        density = self.density()
        for rank in range(self.size):
            for name in self.params:
                entries = self._local(rank, name, gradients[rank][name], density)
                average[name].view(-1)[entries[0]] += entries[1]
                self.sent[rank][name] = entries[0]
        self.committed += 1
        return average

    def _local(self, rank: int, name: str, gradient: torch.Tensor, density: float) -> tuple[torch.Tensor, torch.Tensor]:
        config, p = self.method, self.params[name]
        factor = 1.0
        if config.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float64) * (1.0 / self.size)
            factor = min(1.0, float((config.clip_norm / math.sqrt(self.size) / norm).float()))
        g = gradient * torch.tensor(1.0 / self.size * factor, dtype=p.dtype)
        if config.weight_decay:
            g = g + p * torch.tensor(config.weight_decay / self.size, dtype=p.dtype)
        m = torch.tensor(config.momentum, dtype=torch.float32).to(p.dtype)
        u, v = self.u[rank], self.v[rank]
        if config.nesterov:
            u[name] = m * (u[name] + g)
            v[name] = (v[name] + u[name]) + g
        elif config.momentum:
            u[name] = m * u[name] + g
            v[name] = v[name] + u[name]
        else:
            v[name] = v[name] + g
        if p.dim() < 2 or density == 1.0:
            sent = v[name].flatten().clone()
            v[name] = torch.zeros_like(p)
            return torch.arange(p.numel()), sent
        indices = largest(v[name], max(1, round(density * p.numel())))
        sent = v[name].view(-1)[indices].clone()
        v[name].view(-1)[indices] = 0.0
        u[name].view(-1)[indices] = 0.0
        return indices, sent
