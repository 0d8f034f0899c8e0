"""Tensors of every kind as memory without gaps, which the transports can read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Target:
    """Memory without gaps for the elements of ``tensor``: its own, or other memory from which they are copied."""

    tensor: torch.Tensor
    dense: torch.Tensor

    def finish(self) -> None:
        """Copy the elements to ``tensor``, unless they are there."""
        if self.dense.data_ptr() == self.tensor.data_ptr():
            return
        # The thread that runs an operation need not be in the mode in which such a tensor may be written to.
        with torch.inference_mode(self.tensor.is_inference()):
            self.tensor.detach().copy_(self.dense)


def contiguous(tensor: Any) -> torch.Tensor:
    """Return ``tensor`` without its graph, or a copy of it, as memory without gaps to read.

    Raises:
        TypeError, ValueError: it is no dense tensor in CPU memory.
    """
    _require_plain(tensor)
    found: torch.Tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return found


def to_change(tensor: Any) -> Target:
    """Return memory to read and to write, with the elements of ``tensor``.

    Raises:
        TypeError, ValueError: it is no dense tensor in CPU memory, or cannot be written to.
    """
    dense = contiguous(tensor)
    if dense.data_ptr() != tensor.data_ptr():
        require_writable(tensor)
    return Target(tensor, dense)


def to_fill(tensor: Any) -> Target:
    """Return memory to write, of the shape of ``tensor``, whose elements it need not have.

    Raises:
        TypeError, ValueError: as from :func:`to_change`.
    """
    _require_plain(tensor)
    target = tensor.detach()
    if target.is_contiguous() and not target.is_conj() and not target.is_neg():
        return Target(tensor, target)
    require_writable(tensor)
    return Target(tensor, torch.empty(target.shape, dtype=target.dtype))


def require_writable(tensor: Any) -> torch.Tensor:
    """Return ``tensor``.

    Raises:
        TypeError, ValueError: it is no dense tensor in CPU memory; or several of its elements are one place in memory,
            to which torch refuses to write.
    """
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
