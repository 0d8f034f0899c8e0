"""The norms of many arrays. Contract: csrc/kernels/norms.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm.checks import first_of
from pycomm.kernels.arrays import empty
from pycomm.kernels.scratch import Scratch
from pycomm.kernels.threads import num_threads


def squared_norms(tensors: Sequence[Any], *, out: Any = None, scratch: Scratch | None = None) -> Any:
    """The sum of squares of each of ``tensors``, a float64 array on their device, one element for each.

    Accumulated in float64, in an order that does not depend on the number of threads. What is not
    finite holds an element that is not (or a float64 beyond 1e154): the flag and the norms are one.

    Args:
        tensors: floating arrays, all on one device.
        out: the array to write to and return; a new one if ``None``.
        scratch: see :class:`Scratch`.

    Raises:
        TypeError: wrong dtype. ValueError: on several devices, or ``out`` has another length.
    """
    if out is None:
        out = empty(first_of("tensors", tensors), (len(tensors),), "float64")
    _native.norms(tensors, out, scratch, num_threads())
    return out
