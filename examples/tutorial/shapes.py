"""The tutorial's data and model: pictures of six shapes, and a small convolutional net that distinguishes them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

SIZE = 16
NAMES = ("disc", "ring", "square", "frame", "cross", "stripes")


class Net(nn.Sequential):
    """Three convolutions and two linear layers: 550,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(64 * 16, 512), nn.ReLU(), nn.Linear(512, len(NAMES))),
        )


def make_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 4096 pictures to train with and 1024 to test with, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return _pictures(4096, generator), _pictures(1024, generator)


def _pictures(count: int, generator: torch.Generator) -> TensorDataset:
    """Draw shapes of random kind, place and size, under noise."""
    labels = torch.randint(len(NAMES), (count,), generator=generator)
    place = 5 + 6 * torch.rand(2, count, 1, 1, generator=generator)
    radius = 3 + 2 * torch.rand(count, 1, 1, generator=generator)
    grid = torch.arange(SIZE, dtype=torch.float32)
    dy, dx = (grid[:, None] - place[0]).abs(), (grid[None, :] - place[1]).abs()
    distance, largest = (dx.square() + dy.square()).sqrt(), torch.maximum(dx, dy)
    shapes = (
        distance < radius,
        (distance - radius).abs() < 1,
        largest < radius,
        (largest - radius).abs() < 1,
        (torch.minimum(dx, dy) < 1) & (largest < radius),
        (largest < radius) & (grid % 4 < 2),
    )
    pictures = torch.stack(shapes)[labels, torch.arange(count)].float()
    pictures += 0.2 * torch.randn(pictures.shape, generator=generator)
    return TensorDataset(pictures[:, None], labels)


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of pictures that the model classifies correctly."""
    x, y = data.tensors
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())
