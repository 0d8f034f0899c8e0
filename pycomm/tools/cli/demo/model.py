"""Small GPT over bytes, and its corpus: the source text of Python's standard library. Plain torch, without pycomm."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

_NUM_BYTES = 256


class Block(nn.Module):
    """Transformer block: causal self-attention and a two-layer perceptron, with pre-norm and residual connections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + torch.as_tensor(self.mlp_out(hidden))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class ByteGPT(nn.Module):
    """GPT that maps bytes ``(batch, length <= context)`` to logits ``(batch, length, 256)``."""

    def __init__(self, width: int, layers: int, context: int, num_heads: int) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(_NUM_BYTES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _NUM_BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        positions = self.position_embedding.weight[: text.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.byte_embedding(text) + positions)))
        return logits


def loss_of(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the cross entropy in nats per byte; an untrained model has about ln 256 = 5.5."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


_VALIDATION_EVERY = 10
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """Corpus of bytes, as uint8 tensors of one dimension."""

    train: torch.Tensor
    validation: torch.Tensor


def source_files(root: Path | None = None) -> list[Path]:
    """Return all ``.py`` files below ``root`` (the standard library), sorted, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(found) < _VALIDATION_EVERY:
        raise FileNotFoundError(f"{len(found)} .py files below {root}, wanted the standard library's source text")
    return sorted(found)


def read_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus; every tenth file is for validation, so that no file is in both parts."""
    files = source_files(root)
    held_out = files[_VALIDATION_EVERY - 1 :: _VALIDATION_EVERY]
    rest = [path for i, path in enumerate(files) if i % _VALIDATION_EVERY != _VALIDATION_EVERY - 1]
    return Corpus(_read(rest), _read(held_out))


def _read(files: list[Path]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def random_starts(text: torch.Tensor, context: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Draw the first bytes of windows of ``context + 1`` bytes."""
    if len(text) <= context:
        raise ValueError(f"context is {context}, but this part of the text has only {len(text)} bytes")
    return torch.randint(len(text) - context, shape, generator=torch.Generator().manual_seed(seed))


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, ``(len(starts), context)`` each: targets are one byte later."""
    picked = text[starts[:, None] + torch.arange(context + 1)].long()
    return picked[:, :-1], picked[:, 1:]
