"""Largest magnitude. Contract: csrc/kernels/absmax.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm.checks import first_of
from pycomm.kernels.arrays import Scratch, empty, num_threads


def absmax(tensors: Sequence[Any], *, scratch: Scratch | None = None) -> Any:
    """Return the largest magnitude in ``tensors`` as a 0-d float32 array on their device; NaN if any element is.

    Args:
        tensors: at least one floating array, all on one device.
        scratch: see :class:`Scratch`.

    Raises:
        TypeError: wrong dtype. ValueError: ``tensors`` is empty.
    """
    out = empty(first_of("tensors", tensors), (), "float32")
    _native.absmax(tensors, out, scratch, num_threads())
    return out
