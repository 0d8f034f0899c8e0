"""Adasum: a sum that takes what two gradients have in common only once.

Of two gradients a and b it is (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum if they are orthogonal, their
mean if they are equal. Of more than two, pairs are combined, then pairs of pairs: the number must be a power of two.
Maleki et al., "Scaling distributed training with adaptive summation", MLSys 2021, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def combine(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Adasum of ``tensors``, a power of two of them, in their dtype; computed in float64 (complex128)."""
    assert tensors
    assert len(tensors) & (len(tensors) - 1) == 0
    dtype = tensors[0].dtype
    wide = [tensor.to(torch.complex128 if dtype.is_complex else torch.float64) for tensor in tensors]
    while len(wide) > 1:
        wide = [_pair(a, b) for a, b in zip(wide[::2], wide[1::2], strict=True)]
    return wide[0].to(dtype)


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    common = torch.vdot(a.flatten(), b.flatten()).real
    norms = [torch.vdot(x.flatten(), x.flatten()).real for x in (a, b)]
    factors = [1.0 - common / (2.0 * norm) if norm > 0 else torch.ones(()) for norm in norms]
    return factors[0] * a + factors[1] * b
