"""Norms of many arrays. Contract: csrc/kernels/norms.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm.kernels.arrays import Scratch, num_threads, one_for_each


def squared_norms(tensors: Sequence[Any], *, out: Any = None, scratch: Scratch | None = None) -> Any:
    """Return the sum of squares of each of ``tensors``: a float64 array on their device, one element for each.

    Accumulated in float64, in an order that does not depend on the number of threads. A sum is not finite
    if an element is not (or is a float64 beyond 1e154), so the norms also detect non-finite elements.

    Args:
        tensors: floating arrays, all on one device.
        out, scratch: as for :func:`hashes`, which also raises the same errors.
    """
    out = one_for_each(tensors, "float64", out)
    _native.norms(tensors, out, scratch, num_threads())
    return out
