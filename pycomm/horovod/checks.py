"""Checks of what is passed to operations. The messages begin with the argument's name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pycomm.horovod.process_sets import ProcessSet, global_process_set
from pycomm.horovod.reduce_ops import Adasum, Average, ReduceOp, Sum
from pycomm.horovod.state import Members

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)


def check_tensor(tensor: Any) -> None:
    """Raise TypeError unless ``tensor`` is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}, wanted a torch.Tensor")
    if tensor.is_nested or tensor.is_quantized:
        raise TypeError(f"tensor is {'nested' if tensor.is_nested else 'quantised'}, wanted a dense one")
    if tensor.layout != torch.strided:
        raise TypeError(f"tensor has layout {tensor.layout}; pass sparse tensors to sparse_allreduce_async()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"tensor is on {tensor.device}, wanted one on the CPU or on a GPU")
    if tensor.is_cpu and tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(f"tensor of shape {list(tensor.shape)} has no memory: it is fake, or was freed")


def check_tensors(tensors: Any) -> None:
    """Raise TypeError or ValueError unless ``tensors`` is a sequence of one or more dense tensors."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"tensors is a {type(tensors).__name__}, wanted a list of tensors")
    if not tensors:
        raise ValueError("tensors is empty, wanted one tensor or more")
    for tensor in tensors:
        check_tensor(tensor)


def check_writable(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if several elements of one of ``tensors`` are one place in memory: torch cannot write there."""
    for tensor in tensors:
        places = zip(tensor.stride(), tensor.shape, strict=True)
        if tensor.numel() > 0 and any(stride == 0 and length > 1 for stride, length in places):
            raise ValueError(f"tensor of shape {list(tensor.shape)} is expanded, and cannot be written to: clone it")


def check_rows(tensors: Sequence[torch.Tensor], kind: str) -> None:
    """Raise ValueError if one of ``tensors`` has no first dimension."""
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError(f"tensor has no dimensions, and {kind} works on rows: pass tensor.reshape(1)")


def check_reducible(tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
    """Raise TypeError if ``op`` is not defined for the dtype of one of ``tensors``."""
    known: tuple[torch.dtype, ...] = _INTEGERS + _FLOATS
    if op in (Sum, Average):
        known += _COMPLEX
    if op != Average:
        known += (torch.bool,)
    if op == Adasum:
        known = _FLOATS + _COMPLEX
    for tensor in tensors:
        if tensor.dtype not in known:
            raise TypeError(f"tensor is of {tensor.dtype}, for which op={op.name} is not defined")


def check_factor(name: str, value: Any) -> float:
    """Return the factor ``value``. Raises TypeError or ValueError unless it is a finite number."""
    if value == 1.0 and type(value) is float:  # nearly always
        return 1.0
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, wanted a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}, wanted a finite number")
    return float(value)


def check_adasum(op: ReduceOp, process_set: ProcessSet, members: Members) -> None:
    """Raise NotImplementedError where Adasum is not defined."""
    if op != Adasum:
        return
    if process_set is not global_process_set:
        raise NotImplementedError("op is Adasum, which works on all ranks: leave process_set out")
    if len(members.ranks) & (len(members.ranks) - 1):
        raise NotImplementedError(
            f"op is Adasum, which wants a power of two of ranks, and there are {len(members.ranks)}"
        )


def check_root(root_rank: Any, members: Members) -> int:
    """Return the position of the global rank ``root_rank`` in the set.

    Raises:
        TypeError, ValueError: it is no rank of the set.
    """
    if not isinstance(root_rank, int) or isinstance(root_rank, bool):
        raise TypeError(f"root_rank is {root_rank!r}, wanted a rank, which is an integer")
    if root_rank not in members.ranks:
        raise ValueError(f"root_rank is {root_rank}, wanted one of the ranks {list(members.ranks)}")
    return list(members.ranks).index(root_rank)


def check_splits(splits: Any, tensor: torch.Tensor, size: int) -> list[int]:
    """Return how many rows of ``tensor`` go to each rank: equally many if ``splits`` is ``None``.

    Raises:
        TypeError, ValueError: ``splits`` is not that.
    """
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"tensor has {rows} rows, wanted a multiple of {size}, the number of ranks, or splits")
        return [rows // size] * size
    given = splits if isinstance(splits, torch.Tensor) else torch.tensor(splits)
    if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise ValueError(f"splits is of {given.dtype}, wanted integers")
    numbers = [int(n) for n in given.flatten().tolist()]
    if len(numbers) != size or min(numbers, default=0) < 0:
        raise ValueError(f"splits is {numbers}, wanted {size} numbers of rows, one for each rank, none negative")
    if sum(numbers) > rows:
        raise ValueError(f"splits is {numbers}, {sum(numbers)} rows in all, and tensor has {rows}")
    return numbers
