"""Accumulation and exact selection in one pass. Contract: csrc/kernels/sparsify.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm.checks import length, pair
from pycomm.kernels.accumulate import Decay, Momentum, arguments_of
from pycomm.kernels.arrays import Scratch, empty, num_threads


def sparsify(  # noqa: PLR0913  # an argument for each array
    acc: Any,
    residual: Any | None,
    grads: Sequence[Any],
    counts: Sequence[int],
    out: tuple[Any, Any],
    thresholds: Any,
    scale: Any = 1.0,
    *,
    num_missed: Any | None = None,
    largest: Any | None = None,
    clip: float | None = None,
    momentum: Momentum | None = None,
    decay: Decay | None = None,
    scratch: Scratch | None = None,
) -> tuple[Any, Any]:
    """Accumulate as :func:`accumulate` does, and select the largest sums of every gradient, exactly.

    Args:
        counts: how many sums to select of each gradient, from 0 to all.
        out: ``(values, indices)`` to write to, contiguous, as many as all ``counts`` together:
            ``indices`` int32, ascending, into flat ``acc``; ``values`` of ``acc``'s dtype. Ties go to
            the lowest index; NaN ranks above inf.
        thresholds: float32 array, one for each gradient, zeros at first and kept by the caller from
            step to step: the last step's smallest selected magnitudes. It never changes the result.
        num_missed: one int32, increased by the number of thresholds that did not help.
        largest: one float32 to write the largest selected magnitude to; for float32 sums only.

    Returns:
        Two bool arrays with an element for each gradient: whether all its sums are finite, and whether
        its threshold did not help, so that the sums had to be read again.

    Raises:
        TypeError, ValueError: dtypes, sizes or counts do not match.
    """
    number = length("grads", grads)
    finite, missed = empty(acc, (number,), "bool"), empty(acc, (number,), "bool")
    values, indices = pair("out", out, "values and indices")
    common = arguments_of(clip, acc, residual, momentum, decay, finite, scale)
    selection = {"counts": counts, "values": values, "indices": indices, "thresholds": thresholds}
    counters = {"missed": missed, "num_missed": num_missed, "largest": largest}
    _native.sparsify(grads, common, **selection, **counters, scratch=scratch, num_threads=num_threads())
    return finite, missed
