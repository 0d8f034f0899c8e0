"""Accumulation and exact selection in one pass. Contract: csrc/kernels/sparsify.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm.checks import length, pair
from pycomm.kernels.accumulate import Decay, Momentum, arguments_of
from pycomm.kernels.arrays import empty
from pycomm.kernels.scratch import Scratch
from pycomm.kernels.threads import num_threads


def sparsify(
    acc: Any,
    residual: Any | None,
    grads: Sequence[Any],
    counts: Sequence[int],
    out: tuple[Any, Any],
    thresholds: Any,
    scale: Any = 1.0,
    *,
    factors: Any | None = None,
    momentum: Momentum | None = None,
    decay: Decay | None = None,
    scratch: Scratch | None = None,
) -> tuple[Any, Any]:
    """As :func:`accumulate`, and what of every gradient's sums is largest in magnitude, exactly.

    Args:
        counts: how many of each gradient, from 0 to all.
        out: ``(values, indices)`` to write to, contiguous, as many as all ``counts``: ``indices``
            int32, ascending, into flat ``acc``; ``values`` of ``acc``'s dtype. Ties go to the lowest
            index; NaN ranks above inf.
        thresholds: float32 array, one for each gradient, zeros at first and kept by the caller from
            step to step: where to look. It never changes the result.

    Returns:
        Two bool arrays, one for each gradient: whether all sums are finite, and whether its threshold
        was none to go by, so that the sums had to be read again.

    Raises:
        TypeError, ValueError: dtypes, sizes or counts that do not fit.
    """
    number = length("grads", grads)
    finite, missed = empty(acc, (number,), "bool"), empty(acc, (number,), "bool")
    values, indices = pair("out", out, "values and indices")
    common = arguments_of(factors, acc, residual, momentum, decay, finite, scale)
    selection = {"counts": counts, "values": values, "indices": indices, "thresholds": thresholds}
    _native.sparsify(grads, **common, **selection, missed=missed, scratch=scratch, num_threads=num_threads())
    return finite, missed
