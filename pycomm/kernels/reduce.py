"""Element-wise reduction of several arrays. Contract: csrc/kernels/reduce.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pycomm._native as _native
from pycomm.checks import reduction
from pycomm.kernels.arrays import Scratch, num_threads


def reduce(out: Any, inputs: Sequence[Any], op: str = "sum", *, scratch: Scratch | None = None) -> None:
    """Write the element-wise ``op`` of ``inputs`` into ``out``.

    Operands are combined in the order of ``inputs``; float16 and bfloat16 accumulate in float32
    and are rounded once. ``out`` may be one of the inputs.

    Args:
        out: contiguous array. inputs: at least one array of ``out``'s dtype and size.
        scratch: see :class:`Scratch`.
        op: "sum", "mean" (floating dtypes only; "avg" is the same), "min" or "max" (NaN wins), "product", "band",
            "bor" or "bxor" (integers only). Sums and products of integers wrap around.

    Raises:
        TypeError: dtypes differ or do not suit ``op``. ValueError: sizes differ, no inputs,
        unknown ``op``, ``out`` not contiguous or read-only.
    """
    _native.reduce(out, inputs, reduction(op), scratch, num_threads())
