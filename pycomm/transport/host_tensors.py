"""Arrays in CPU memory as one-dimensional tensors, checked for use in an operation."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple, SupportsIndex

import torch

import pycomm._native as _native
from pycomm.kernels.arrays import FLOATING

OPS = ("sum", "mean", "min", "max", "product", "band", "bor", "bxor")
"""Reductions, numbered as in csrc/kernels/reduce_op.h."""
BITWISE = OPS[5:]


class Pair(NamedTuple):
    """Output and input of an operation, as flat tensors."""

    out: torch.Tensor
    x: torch.Tensor
    tag: int
    """Tag of their dtype."""
    elements: int
    """Number of elements of ``x`` in its own dtype."""


def require(condition: bool, problem: str, kind: type[Exception] = ValueError) -> None:
    """Raise an exception of type ``kind`` with the message ``problem`` unless ``condition`` holds."""
    if not condition:
        raise kind(problem)


def require_op(op: object, dtype: str, name: str) -> None:
    """Raise TypeError or ValueError unless ``op`` is a reduction that is defined for ``dtype``."""
    wanted = "wanted 'sum', 'mean', 'min', 'max', 'product', 'band', 'bor' or 'bxor'"
    require(isinstance(op, str), f"op is {op!r}, {wanted}", TypeError)
    require(op in OPS, f"op is {op!r}, {wanted}")
    floating = dtype in FLOATING
    require(op != "mean" or floating, f"op 'mean' wants a floating dtype, {name} has {dtype}", TypeError)
    require(op not in BITWISE or not floating, f"op '{op}' wants an integer dtype, {name} has {dtype}", TypeError)


def rank_of(value: object, name: str, size: int) -> int:
    """Return the argument ``name`` as a rank of a group of ``size``; raise TypeError or ValueError if it is none."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, wanted an int")
    require(0 <= index(value) < size, f"{name} is {value}, wanted 0 <= {name} < {size}")
    return index(value)


def reducible(name: str, x: Any, op: object, writes: bool) -> torch.Tensor:
    """Return ``x`` as a flat tensor for the reduction ``op``.

    Raises:
        TypeError, ValueError: no reduction can use ``x``, or not this one.
    """
    array = _native.HostArray(x, name, writes, False)
    require_op(op, array.dtype, name)
    return tensor_of(array)


def tensor_of(array: _native.HostArray) -> torch.Tensor:
    """Return a one-dimensional tensor on the memory of ``array``, which it keeps alive."""
    dtype: torch.dtype = getattr(torch, array.dtype)
    return torch.frombuffer(array, dtype=dtype) if array.count > 0 else torch.empty(0, dtype=dtype)


def apart(out: Any, x: Any, rank: int, size: int, ops: tuple[Any, ...] = ()) -> Pair:
    """Return ``out`` and ``x`` as flat tensors; they must not overlap, or one must be this rank's part of the other.

    Args:
        out: array to write.
        x: array to read, of the same dtype.
        rank: this rank.
        size: number of ranks.
        ops: reductions that must be defined for the dtype; none if bytes are only moved.

    Raises:
        TypeError, ValueError: the operation cannot use them, or they do not match each other.
    """
    moves = not ops
    target, source = _native.HostArray(out, "out", True, moves), _native.HostArray(x, "x", False, moves)
    for op in ops:
        require_op(op, source.dtype, "x")
        require(source.dtype == target.dtype, f"x has dtype {source.dtype}, wanted {target.dtype} as out", TypeError)
    require(source.tag == target.tag, "out and x have different dtypes", TypeError)
    require(source.dtype == target.dtype, f"out has dtype {target.dtype}, wanted {source.dtype} as x", TypeError)
    require(
        not target.overlaps(source, rank, size),
        "out overlaps x, wanted arrays apart, or one that is this rank's part of the other",
    )
    read = tensor_of(source)
    if target.count > 0 and target.overlaps(source, -1, size):
        read = read.clone()  # not every backend works in place
    return Pair(tensor_of(target), read, source.tag, source.elements)
