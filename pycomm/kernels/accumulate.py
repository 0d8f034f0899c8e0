"""The first half of error feedback. Contract: csrc/kernels/accumulate.h."""

from __future__ import annotations

from typing import Any

from pycomm import _native
from pycomm.kernels.arrays import empty
from pycomm.kernels.threads import num_threads


def accumulate(acc: Any, residual: Any | None, grad: Any, scale: Any = 1.0) -> Any:
    """``acc = residual + grad * scale`` in one pass; ``residual=None`` stands for zeros.

    Args:
        acc: contiguous float32 array (float64 if ``grad`` is) of ``grad``'s size.
        residual: like ``acc``; may be ``acc``.
        grad: floating array.
        scale: a number, or an array of one float32, also on the GPU, that is read when the kernel runs.

    Returns:
        A 0-d bool array on ``acc``'s device: whether everything written is finite.

    Raises:
        TypeError, ValueError: dtypes or sizes that do not match.
    """
    finite = empty(acc, (), "bool")
    _native.accumulate(acc, residual, grad, scale, finite, num_threads())
    return finite
