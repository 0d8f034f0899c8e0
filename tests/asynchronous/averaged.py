"""What ranks come to that average their parameters every so many steps: a plain restatement in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

import pycomm
from tests.asynchronous.runs import loss_of, model_of

NUMEL = 53
HALVES = [(slice(0, 30), 2), (slice(30, NUMEL), 4)]
"""The first layer's weight is about half of all; with ``fragments=2`` and ``every=4`` it meets after two steps."""


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@dataclass
class Course:
    """Course of a training; rank r weighs r + 1 where it is ``weighted``.

    Attributes:
        turns: what meets, and after how many of ``every`` steps.
        top: fraction of the entries that travel, of each matrix.
        lost: step in which a rank does not take part any more.
        missed: step in which it began to meet last so that it counted, if it was under way when it was lost.
        come: steps that the others have made when a rank comes.
    """

    size: int
    steps: int
    every: int = 4
    outer: pycomm.Nesterov | pycomm.Elastic | None = None
    delay: int = 0
    top: float | None = None
    turns: list[tuple[slice, int]] = field(default_factory=lambda: [(slice(0, NUMEL), 4)])
    weighted: bool = True
    lost: Mapping[int, int] = field(default_factory=dict)
    missed: Mapping[int, int] = field(default_factory=dict)
    come: Mapping[int, int] = field(default_factory=dict)

    def expected(self) -> list[torch.Tensor]:
        """Return the parameters of all ranks, a row each, after each step."""
        ranks = range(self.size + len(self.come))
        models = [model_of() for _ in ranks]
        optimizers = [torch.optim.Adam(model.parameters(), 0.02) for model in models]
        self._anchor = flat(models[0])
        self._velocity = torch.zeros_like(self._anchor)
        self._residuals = torch.zeros(len(ranks), NUMEL, dtype=torch.float64)
        under_way: list[tuple[int, slice, torch.Tensor]] = []
        found = []
        for step in range(self.steps):
            world = [r for r in ranks if step < self.lost.get(r, self.steps) and step >= self.come.get(r, 0)]
            for rank in world:
                if self.come.get(rank) == step:
                    torch.nn.utils.vector_to_parameters(self._anchor.clone(), models[rank].parameters())
                optimizers[rank].zero_grad()
                loss_of(models[rank], rank, step).backward()
                optimizers[rank].step()
            now = torch.stack([flat(model) for model in models])
            if self.delay:
                for begun, piece, mean in [each for each in under_way if each[0] + self.delay == step]:
                    under_way = [each for each in under_way if each[1] != piece or each[0] != begun]
                    self._land(piece, mean)
                    now[:, piece] = 0.5 * (now[:, piece] + self._anchor[piece])
            for piece, turn in self.turns:
                if step % self.every + 1 == turn:
                    met = [r for r in world if step <= self.missed.get(r, self.steps)]
                    mean = self._mean(now, piece, met)
                    if self.delay:
                        under_way.append((step, piece, mean))
                    elif isinstance(self.outer, pycomm.Elastic):
                        now[:, piece] -= self.outer.strength / len(met) * (now[:, piece] - self._anchor[piece])
                        self._anchor[piece] -= self.outer.strength * mean
                    else:
                        self._land(piece, mean)
                        now[:, piece] = self._anchor[piece]
            for model, mine in zip(models, now, strict=True):
                torch.nn.utils.vector_to_parameters(mine.clone(), model.parameters())
            found.append(now.clone())
        return found

    def _mean(self, now: torch.Tensor, piece: slice, world: list[int]) -> torch.Tensor:
        weights = torch.tensor([float(r + 1) if self.weighted else 1.0 for r in world], dtype=torch.float64)
        moved = (self._anchor - now)[world][:, piece] * (weights / weights.sum())[:, None]
        if self.top is None:
            return moved.sum(0)
        total = torch.zeros_like(moved[0])
        for rank, mine in zip(world, moved, strict=True):
            left = self._residuals[rank, piece]
            left += mine
            begin = 0
            for p in model_of().parameters():
                inside = slice(begin - piece.start, begin - piece.start + p.numel())
                if piece.start <= begin < piece.stop:
                    count = max(1, round(self.top * p.numel())) if p.dim() > 1 else p.numel()
                    sent = left[inside].abs().topk(count).indices + inside.start
                    total[sent] += left[sent]
                    left[sent] = 0.0
                begin += p.numel()
        return total

    def _land(self, piece: slice, moved: torch.Tensor) -> None:
        if isinstance(self.outer, pycomm.Nesterov):
            self._velocity[piece] = self.outer.momentum * self._velocity[piece] + moved
            moved = self.outer.lr * (moved + self.outer.momentum * self._velocity[piece])
        self._anchor[piece] -= moved
