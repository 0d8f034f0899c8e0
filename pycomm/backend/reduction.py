"""Reductions in torch's words, and as the transports know them."""

from __future__ import annotations

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
