"""Newton-Schulz iteration: matrices whose singular values all become about 1, many of one shape at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from pycomm.torch_internals import multiplies_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Keller Jordan's quintic, whose slope at zero is steep: 5 steps bring values to about 0.7 to 1.2."""

_LARGEST_BATCH = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Elements of matrices that are multiplied at once, by device: more would not stay in the caches of a CPU."""


def orthogonalized(
    matrices: list[torch.Tensor],
    steps: int,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Return an approximation of U V^T for each matrix U S V^T, in the dtype of the products.

    Matrices of one shape, or of its transpose, are stacked. The others of its stack change a result by rounding only.

    Args:
        dtype: dtype of the products; ``None``: see :func:`product_dtype`.
    """
    results = list(matrices)
    for some in in_stacks(matrices):
        stack = torch.stack([_wide(matrices[i]).to(dtype or product_dtype(matrices[i])) for i in some])
        for i, result in zip(some, _iterated(stack, steps, coefficients, eps), strict=True):
            results[i] = result.mT if matrices[i].shape[0] > matrices[i].shape[1] else result
    return results


def in_stacks(params: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield the places of ``params`` that are stacked: of one shape or its transpose, as matrices, and not too many."""
    by_shape: dict[tuple[object, ...], list[int]] = {}
    for i, p in enumerate(params):
        shape = sorted((p.shape[0], math.prod(p.shape[1:])))
        by_shape.setdefault((*shape, p.device, p.dtype), []).append(i)
    for alike in by_shape.values():
        first = params[alike[0]]
        size = max(1, _LARGEST_BATCH.get(first.device.type, 1 << 24) // max(1, first.numel()))
        yield from (alike[at : at + size] for at in range(0, len(alike), size))


def product_dtype(matrix: torch.Tensor) -> torch.dtype:
    """Return float64 for a float64 matrix; else bfloat16 if its device multiplies in it fast, or float32."""
    if matrix.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if multiplies_bfloat16(matrix.device) else torch.float32


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def _iterated(x: torch.Tensor, steps: int, coefficients: tuple[float, float, float], eps: float) -> torch.Tensor:
    a, b, c = coefficients
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=eps)  # no singular value is above 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
