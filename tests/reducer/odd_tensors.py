"""Tensors that are not one piece of plain memory."""

from __future__ import annotations

import torch
from torch import nn


class Scales:
    """What a quantized parameter of bitsandbytes keeps beside its bytes."""

    def __init__(self, scale: float) -> None:
        self.absmax = torch.tensor([scale])


class Quantized(nn.Parameter):
    """Bytes whose meaning is in an attribute."""

    quant_state: Scales

    @classmethod
    def of(cls, data: torch.Tensor, scale: float) -> Quantized:
        made: Quantized = torch.Tensor._make_subclass(cls, data.to(torch.uint8), False)
        made.quant_state = Scales(scale)
        return made


def quantized(x: float, *, by_channel: bool) -> torch.Tensor:
    values = torch.tensor([[1.0, x], [x, 1.0]])
    if by_channel:
        scales, zeros = torch.tensor([0.1, 0.2]), torch.zeros(2, dtype=torch.int64)
        return torch.quantize_per_channel(values, scales, zeros, 0, torch.qint8)
    return torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)


def overlapping(x: float) -> torch.Tensor:
    """Windows of a strided series: elements occur twice, and some not at all."""
    return (torch.arange(9.0) * x).as_strided((3, 3), (2, 2))
