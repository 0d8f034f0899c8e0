"""Models to split, in float64, and their training on one process or on several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from pycomm.tools.cli.demo.model import ByteGPT

D = torch.float64
WIDTH = 8
Made = Callable[[], tuple[nn.Module, torch.Tensor]]


class GatedMLP(nn.Module):
    """Perceptron whose hidden features are gated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate_proj = nn.Linear(WIDTH, 12, bias=False)
        self.up_proj = nn.Linear(WIDTH, 12, bias=False)
        self.down_proj = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(h)) * self.up_proj(h))


class Attention(nn.Module):
    """Causal attention with a projection for each of query, key and value."""

    def __init__(self, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        h = self.norm(x)
        q, k, v = (
            layer(h).view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out_proj(mixed.transpose(1, 2).reshape(batch, length, width))


class Words(nn.Module):
    """Embedding and head that share their weight, with a perceptron in between."""

    def __init__(self, vocabulary: int = 12, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))
        self.head = nn.Linear(WIDTH, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(words)))


def convolutions() -> nn.Sequential:
    """Return a small AlexNet: convolutions with pooling, then Linear."""
    features = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(6, 8, 1),
    )
    classifier = nn.Sequential(nn.Linear(8 * 9, 10), nn.Tanh(), nn.Dropout(0.0), nn.Linear(10, 4), nn.Linear(4, 3))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(3), nn.Flatten(), classifier)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(7))


def words(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(7))


MODELS: dict[str, Made] = {
    "perceptron": lambda: (
        nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)),
        random(5, 6),
    ),
    "gated": lambda: (GatedMLP(), random(2, 3, WIDTH)),
    "attention": lambda: (nn.Sequential(Attention(), GatedMLP()), random(2, 5, WIDTH)),
    "encoder": lambda: (
        nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True),
        random(2, 5, WIDTH),
    ),
    "gpt": lambda: (ByteGPT(WIDTH, 2, 6, 2), words(256, 2, 6)),
    "convolutions": lambda: (convolutions(), random(3, 2, 6, 6)),
    "words": lambda: (Words(), words(12, 2, 5)),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with parameters of this seed, and its input."""
    torch.manual_seed(seed)
    model, x = MODELS[name]()
    return model.to(D), x


def whole(tensor: Any) -> torch.Tensor:
    """Return all of a tensor, of which this rank may have a part."""
    found: torch.Tensor = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found


def train(model: nn.Module, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """Return outputs, gradients (of the input too) and parameters of some steps, each in full."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = x.clone().requires_grad_(x.is_floating_point())
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        x.grad = None
        out = model(x)
        assert not isinstance(out, DTensor)
        loss = functional.cross_entropy(out.flatten(0, -2), torch.arange(out[..., 0].numel()) % out.shape[-1])
        loss.backward()
        found += [out.detach().clone(), *(whole(param.grad).clone() for param in model.parameters())]
        found += [] if x.grad is None else [x.grad.clone()]
        optimizer.step()
    return found + [whole(param).clone() for param in model.parameters()]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
