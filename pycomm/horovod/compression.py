"""Compression by Horovod's names."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Way to make a tensor smaller before an operation, and to undo it after. Derive from it to write one."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what to send of ``tensor``, and what :meth:`decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor of which ``tensor`` has been received."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Compression that leaves everything as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return ``tensor``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return ``tensor``."""
        return tensor


class FP16Compressor(Compressor):
    """Compression that casts floating-point tensors to float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return ``tensor`` in float16, unless it is of integers, and its dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return ``tensor`` in the dtype that it had."""
        return tensor.to(ctx) if tensor.is_floating_point() else tensor


class Compression:
    """Compressions that Horovod has. For others, pass one of pycomm's to ``DistributedOptimizer``."""

    none = NoneCompressor
    fp16 = FP16Compressor
