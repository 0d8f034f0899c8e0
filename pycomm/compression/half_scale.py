"""Scale that float16 values travel with."""

from __future__ import annotations

import math

import torch

_TOP = 15  # 2**15 is half of float16's range: room for roundings on the way


def agreed_scale(largest: torch.Tensor, size: int) -> torch.Tensor:
    """Return the power of two that brings ``largest * size`` below, and near, the top of float16.

    Computed where ``largest`` lies, without waiting for a GPU.

    Args:
        largest: the largest magnitude on any rank, a 0-d float32 tensor. 1 is returned if it is 0 or not
            finite.
    """
    _, exponent = torch.frexp(largest)  # largest <= 2 ** exponent
    fitting = (_TOP - math.ceil(math.log2(size)) - exponent).clamp(-126, 126)
    scale = ((fitting + 127) << 23).view(torch.float32)  # its bits: exact, where a power function need not be
    return torch.where(torch.isfinite(largest) & (largest > 0.0), scale, 1.0)
