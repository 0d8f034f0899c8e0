"""Models of ``bench.planning``: a perceptron, and the demo's byte-level GPT as a row of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from pycomm.tools.cli.demo.model import Block, loss_of


class Embedding(nn.Module):
    """Embeddings of bytes and of their positions, added up."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        positions: torch.Tensor = self.position.weight[: text.shape[1]]
        return torch.as_tensor(self.byte(text)) + positions


def perceptron(width: int, layers: int) -> nn.Sequential:
    """Return pairs of linear layers, to four times the width and back, with ReLU between all."""
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def gpt(width: int, layers: int, context: int, heads: int) -> nn.Sequential:
    """Return the GPT of ``pycomm demo``, as ``nn.Sequential``."""
    blocks = (Block(width, heads) for _ in range(layers))
    return nn.Sequential(Embedding(width, context), *blocks, nn.LayerNorm(width), nn.Linear(width, 256, bias=False))


@dataclass(frozen=True)
class Case:
    """Model with its data.

    Attributes:
        make: makes the model, the tiny one if it is told so. batch: its input for so many samples.
        target: the targets for as many. loss: of output and target.
        samples: of a step, over all replicas.
    """

    make: Callable[[bool], nn.Sequential]
    batch: Callable[[int, bool], torch.Tensor]
    target: Callable[[int, bool], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    samples: int


def _text(samples: int, tiny: bool) -> torch.Tensor:
    return torch.randint(256, (samples, 8 if tiny else 128))


CASES = {
    "perceptron": Case(
        make=lambda tiny: perceptron(8 if tiny else 640, 3),
        batch=lambda samples, tiny: torch.randn(samples, 8 if tiny else 640),
        target=lambda samples, tiny: torch.randn(samples, 8 if tiny else 640),
        loss=nn.functional.mse_loss,
        samples=512,
    ),
    "gpt": Case(
        make=lambda tiny: gpt(*((8, 4, 8, 4) if tiny else (256, 4, 128, 4))),
        batch=_text,
        target=_text,
        loss=loss_of,
        samples=16,
    ),
}
