"""Reductions by Horovod's names."""

from __future__ import annotations

import enum
import warnings
from typing import Any


class ReduceOp(enum.IntEnum):
    """Reduction; the numbers are Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

NAMES = {Average: "mean", Sum: "sum", Adasum: "adasum", Min: "min", Max: "max", Product: "product"}
"""What the reductions are called elsewhere in pycomm."""


def checked_op(op: Any, average: bool | None = None) -> ReduceOp:
    """Return the reduction that the arguments ``op`` and ``average``, which it has replaced, stand for.

    Raises:
        ValueError: ``op`` is none, or both are given. An error in the place of ``op`` is raised.
    """
    if isinstance(op, Exception):
        raise op
    if average is None and type(op) is ReduceOp:
        return op
    if op is not None and average is not None:
        raise ValueError("op and average are both given; op has replaced average: leave average out")
    if average is not None:
        warnings.warn("average= has been replaced by op=: hvd.Average or hvd.Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    if op is None:
        return Average
    try:
        return ReduceOp(op)
    except (ValueError, TypeError):
        wanted = ", ".join(f"hvd.{each.name}" for each in ReduceOp)
        raise ValueError(f"op is {op!r}, wanted one of {wanted}") from None
