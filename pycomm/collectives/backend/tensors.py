"""Torch's tensors and reductions in the transports' terms: contiguous memory, and pycomm's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Target:
    """Contiguous memory for the elements of ``tensor``: its own, or a buffer that is copied back."""

    tensor: torch.Tensor
    dense: torch.Tensor

    def finish(self) -> None:
        """Copy the elements back to ``tensor`` if they are in a buffer."""
        if self.dense.data_ptr() == self.tensor.data_ptr():
            return
        # An inference tensor can be written in inference mode only, which this thread need not be in.
        with torch.inference_mode(self.tensor.is_inference()):
            self.tensor.detach().copy_(self.dense)


def contiguous(tensor: Any) -> torch.Tensor:
    """Return ``tensor`` detached and contiguous, for reading; a copy if necessary."""
    _require_plain(tensor)
    found: torch.Tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return found


def to_change(tensor: Any) -> Target:
    """Return contiguous memory with the elements of ``tensor``, for reading and writing."""
    dense = contiguous(tensor)
    if dense.data_ptr() != tensor.data_ptr():
        require_writable(tensor)
    return Target(tensor, dense)


def to_fill(tensor: Any) -> Target:
    """Return contiguous memory of the shape of ``tensor``, for writing; its elements are undefined."""
    _require_plain(tensor)
    target = tensor.detach()
    if target.is_contiguous() and not target.is_conj() and not target.is_neg():
        return Target(tensor, target)
    require_writable(tensor)
    return Target(tensor, torch.empty(target.shape, dtype=target.dtype))


def require_writable(tensor: Any) -> torch.Tensor:
    """Return ``tensor``."""
    _require_plain(tensor)
    repeated = (stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True))
    if tensor.numel() > 0 and any(repeated):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} is expanded, and cannot be written to: clone it")
    found: torch.Tensor = tensor
    return found


def _require_plain(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} was given, wanted a tensor")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else f"in layout {tensor.layout}"
        raise TypeError(f"a tensor is {kind}, wanted a dense one")
    if not tensor.is_cpu:
        raise TypeError(f"a tensor is on {tensor.device}, wanted it on the CPU, as another one of this call is")
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} has no memory: it is fake, or was freed")


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
# Reductions of booleans, as bytes of 0 or 1.
_OF_BOOL = {"sum": "max", "max": "max", "bor": "max", "product": "min", "min": "min", "band": "min", "bxor": "bxor"}
_OF_COMPLEX = ("sum", "mean")


def known_name(op: Any) -> str | None:
    """Return pycomm's name of a ``torch.distributed.ReduceOp``; ``None`` if it has none."""
    for known, name in _NAMES:
        if op == known:
            return name
    return None


def name_of(op: Any) -> str:
    """Return pycomm's name of a ``torch.distributed.ReduceOp``."""
    name = known_name(op)
    if name is not None:
        return name
    shown = "PREMUL_SUM" if op == dist.ReduceOp.PREMUL_SUM else op  # its repr is an address
    raise ValueError(f"op is {shown}, wanted SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR")


def reducible(tensor: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """Return a view of contiguous ``tensor``, and the reduction of the view that is equivalent to ``op``."""
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
