"""Reductions in torch's words, and tensors of every kind as arrays that the transports can reduce or move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_NAMES = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)
# Of bytes that are 0 or 1.
_OF_BOOL = {"sum": "max", "max": "max", "bor": "max", "product": "min", "min": "min", "band": "min", "bxor": "bxor"}
_OF_COMPLEX = ("sum", "mean")


def name_of(op: Any) -> str:
    """Return pycomm's name of a ``torch.distributed.ReduceOp``.

    Raises:
        ValueError: there is no such reduction here (PREMUL_SUM is NCCL's).
    """
    for known, name in _NAMES:
        if op == known:
            return name
    shown = "PREMUL_SUM" if op == dist.ReduceOp.PREMUL_SUM else op  # whose own text is an address
    raise ValueError(f"op is {shown}, wanted SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR")


def reducible(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """Return a view of contiguous ``tensor`` and the reduction of its elements that amounts to ``op`` on ``tensor``.

    Raises:
        TypeError: ``op`` is not defined for the dtype.
    """
    tensor = tensor.detach()
    if tensor.dtype == torch.bool:
        if op not in _OF_BOOL:
            raise TypeError(f"op is {op!r}, which is not defined for a tensor of torch.bool")
        return tensor.view(torch.uint8), _OF_BOOL[op]
    if tensor.is_complex():
        if op not in _OF_COMPLEX:
            raise TypeError(f"op is {op!r}, which is not defined for a tensor of {tensor.dtype}")
        return torch.view_as_real(tensor.resolve_conj()), op
    return tensor, op


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without its graph, or a copy of it, as memory without gaps to read."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def in_place(tensor: torch.Tensor, change: Callable[[torch.Tensor], None]) -> None:
    """Let ``change`` have the elements of ``tensor`` as memory without gaps, to read and to write."""
    dense = contiguous(tensor)
    change(dense)
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


def filled(tensor: torch.Tensor, fill: Callable[[torch.Tensor], None]) -> None:
    """Let ``fill`` write the elements of ``tensor`` into memory without gaps, of the same shape."""
    target = tensor.detach()
    if target.is_contiguous() and not target.is_conj() and not target.is_neg():
        fill(target)
        return
    dense = torch.empty(target.shape, dtype=target.dtype)
    fill(dense)
    target.copy_(dense)
