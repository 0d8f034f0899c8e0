"""Small models and a loss for all tests; models for one part of pycomm are in that part's folder."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def perceptron(*widths: int, seed: int | None = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return linear layers of ``widths`` with tanh between them; ``seed=None`` leaves torch's generator as it is."""
    if seed is not None:
        torch.manual_seed(seed)
    layers = [layer for sizes in pairwise(widths) for layer in (nn.Tanh(), nn.Linear(*sizes))]
    return nn.Sequential(*layers[1:]).to(dtype)


def mean_square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()
