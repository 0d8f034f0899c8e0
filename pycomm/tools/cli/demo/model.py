"""Small GPT over bytes: plain torch, without pycomm."""

from __future__ import annotations

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
