"""Newton-Schulz iteration: matrices whose singular values all become about 1, many of one shape at a time."""

from __future__ import annotations

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
    by_shape: dict[tuple[object, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault((*sorted(matrix.shape), matrix.device, matrix.dtype), []).append(i)
    results = list(matrices)
    for alike in by_shape.values():
        first = matrices[alike[0]]
        size = max(1, _LARGEST_BATCH.get(first.device.type, 1 << 24) // max(1, first.numel()))
        for some in (alike[at : at + size] for at in range(0, len(alike), size)):
            stack = torch.stack([_wide(matrices[i]).to(dtype or product_dtype(matrices[i])) for i in some])
            for i, result in zip(some, _iterated(stack, steps, coefficients, eps), strict=True):
                results[i] = result.mT if matrices[i].shape[0] > matrices[i].shape[1] else result
    return results


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
