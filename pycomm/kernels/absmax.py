"""The largest magnitude. Contract: csrc/kernels/absmax.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm import _native
from pycomm.kernels.arrays import scalar_like
from pycomm.kernels.threads import num_threads


def absmax(tensors: Sequence[Any]) -> Any:
    """The largest magnitude in ``tensors`` as a 0-d float32 array; NaN if any element is.

    Raises:
        TypeError: wrong dtype. ValueError: ``tensors`` is empty.
    """
    return scalar_like(tensors[0] if tensors else None, _native.absmax(tensors, num_threads()))
