"""Arrays in CPU memory as one-dimensional tensors, checked for use in an operation: one, two, or one for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple, SupportsIndex

import torch

import pycomm._native as _native
from pycomm.checks import shown
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


def require(condition: bool, problem: str, kind: type[Exception] = ValueError) -> None:
    """Raise an exception of type ``kind`` with the message ``problem`` unless ``condition`` holds."""
    if not condition:
        raise kind(problem)


def require_op(op: object, dtype: str, name: str) -> None:
    """Raise TypeError or ValueError unless ``op`` is a reduction that is defined for ``dtype``."""
    wanted = "wanted 'sum', 'mean', 'min', 'max', 'product', 'band', 'bor' or 'bxor'"
    require(isinstance(op, str), f"op is {shown(op)}, {wanted}", TypeError)
    require(op in OPS, f"op is {op!r}, {wanted}")
    floating = dtype in FLOATING
    require(op != "mean" or floating, f"op 'mean' requires a floating dtype, {name} has {dtype}", TypeError)
    require(op not in BITWISE or not floating, f"op '{op}' requires an integer dtype, {name} has {dtype}", TypeError)


def rank_of(value: object, name: str, size: int) -> int:
    """Return the argument ``name`` as an int in range(``size``), such as a rank; else raise TypeError or ValueError."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, wanted an int")
    require(0 <= index(value) < size, f"{name} is {value}, wanted 0 <= {name} < {size}")
    return index(value)


def reducible(name: str, x: Any, op: object, writes: bool) -> torch.Tensor:
    """Return ``x`` as a flat tensor for the reduction ``op``."""
    array = _native.HostArray(x, name, writes, False)
    require_op(op, array.dtype, name)
    return tensor_of(array)


def movable(name: str, x: Any, writes: bool) -> torch.Tensor:
    """Return ``x``, of any dtype, as a flat tensor whose elements are only moved."""
    return tensor_of(_native.HostArray(x, name, writes, True))


def tensor_of(array: _native.HostArray) -> torch.Tensor:
    """Return a one-dimensional tensor on the memory of ``array``, which it keeps alive."""
    dtype: torch.dtype = getattr(torch, array.dtype)
    return torch.frombuffer(array, dtype=dtype) if array.count > 0 else torch.empty(0, dtype=dtype)


def private_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor in memory of this process; raise MemoryError if there is too little."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:  # torch's allocator
        raise MemoryError(f"a tensor of shape {shape} ({dtype}) needed more memory than there is") from None


def pair_for(kind: str, out: Any, x: Any, rank: int, size: int, ops: tuple[Any, ...] = ()) -> Pair:
    """Return ``out`` and ``x`` as flat tensors; they must not overlap, or one must be this rank's part of the other.

    Args:
        kind: "reduce_scatter", "all_gather" or "all_to_all", for which their lengths must fit.
        out: array to write.
        x: array to read, of the same dtype.
        rank: this rank.
        size: number of ranks.
        ops: reductions that must be defined for the dtype; none if bytes are only moved.
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
    pair = Pair(tensor_of(target), read, source.tag)
    counts = pair.out.numel(), pair.x.numel()
    if kind == "reduce_scatter":
        wanted = f"wanted {size * counts[0]}: {size} ranks times the {counts[0]} of out"
        require(counts[1] == size * counts[0], f"x has {counts[1]} elements, {wanted}")
    elif kind == "all_gather":
        wanted = f"wanted {size * counts[1]}: {size} ranks times the {counts[1]} of x"
        require(counts[0] == size * counts[1], f"out has {counts[0]} elements, {wanted}")
    else:
        require(counts[0] == counts[1], f"out has {counts[0]} elements, wanted {counts[1]}, as x")
        problem = f"x has {source.elements} elements, wanted a multiple of the {size} ranks"
        require(source.elements % size == 0, problem)
    return pair


def _one_each(name: str, arrays: object, size: int, writes: bool) -> list[_native.HostArray | None]:
    """Return the argument ``name``, a sequence of an array, or ``None``, for each of ``size`` ranks, in memory."""
    ordered = isinstance(arrays, Sequence) and not isinstance(arrays, str)
    require(ordered, f"{name} is a {type(arrays).__name__}, wanted a sequence of arrays", TypeError)
    assert isinstance(arrays, Sequence)
    require(len(arrays) == size, f"{name} has {len(arrays)} arrays, wanted {size}, one for each rank")
    return [
        None if array is None else _native.HostArray(array, f"{name}[{p}]", writes, True)
        for p, array in enumerate(arrays)
    ]


def _bytes_of(array: _native.HostArray | None) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8) if array is None else tensor_of(array).view(torch.uint8)


def parts_apart(outs: object, xs: object, rank: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the arrays to write and those to read as flat tensors of bytes, empty where there is ``None``.

    No array to write may overlap another one, or one to read, but that ``outs[rank]`` may be ``xs[rank]``.
    """
    targets = [_bytes_of(array) for array in _one_each("outs", outs, size, True)]
    sources = [_bytes_of(array) for array in _one_each("xs", xs, size, False)]
    in_place = _is_same(targets[rank], sources[rank])
    for p, target in enumerate(targets):
        for q in range(size):
            problem = f"outs[{p}] overlaps outs[{q}], wanted arrays apart"
            require(q >= p or not _overlap(target, targets[q]), problem)
            problem = f"outs[{p}] overlaps xs[{q}], wanted arrays apart, or outs[rank] and xs[rank] the same"
            require((p == rank and in_place) or not _overlap(target, sources[q]), problem)
    return targets, sources


def contributions(out: Any, xs: object, op: object, rank: int, size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return ``out`` as a flat tensor, and what each rank gets of this one, which has ``out``'s dtype."""
    target = reducible("out", out, op, writes=True)
    sources = []
    for p, array in enumerate(_one_each("xs", xs, size, False)):
        if array is None:
            sources.append(torch.empty(0, dtype=target.dtype))
            continue
        source = tensor_of(array)
        found = "another dtype" if array.tag else array.dtype
        require(
            array.tag == 0 and source.dtype == target.dtype,
            f"xs[{p}] has {found}, wanted dtype {str(target.dtype).removeprefix('torch.')} as out",
            TypeError,
        )
        problem = f"out overlaps xs[{p}], wanted arrays apart, or out and xs[rank] the same"
        require((p == rank and _is_same(target, source)) or not _overlap(target, source), problem)
        sources.append(source)
    counts = target.numel(), sources[rank].numel()
    require(counts[0] == counts[1], f"out has {counts[0]} elements, wanted {counts[1]}, as xs[{rank}] has")
    return target, sources


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.nbytes == b.nbytes


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.nbytes == 0 or b.nbytes == 0:
        return False
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
