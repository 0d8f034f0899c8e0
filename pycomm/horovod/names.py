"""Reductions, compressions and exceptions by Horovod's names."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pycomm.checks import shown
from pycomm.errors import CommError


class HorovodInternalError(RuntimeError):
    """Failure of an operation on which ranks had to agree. :func:`pycomm.horovod.elastic.run` recovers from it."""


class InvalidRequestError(HorovodInternalError, ValueError):
    """Mistake in an operation, on this rank or on another. The operation is dropped, and the ranks can continue.

    Horovod raises a ``RuntimeError`` for some of these mistakes and a ``ValueError`` for others; this is both.
    """


class LostPeerError(HorovodInternalError, CommError):
    """Failure of a peer or of the link to it: :class:`pycomm.CommError` under Horovod's name."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Notice that ranks have joined or will leave. :func:`pycomm.horovod.elastic.run` restarts.

    Args:
        skip_sync: whether the state is already the same on all ranks, so that it need not be sent.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks of the job have changed")
        self.skip_sync = skip_sync


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
"""Names of the reductions elsewhere in pycomm."""


def checked_op(op: Any) -> ReduceOp:
    """Return the reduction ``op``, Average for ``None``; raise ``op`` if it is an error, otherwise ValueError."""
    if isinstance(op, Exception):
        raise op
    if op is None or type(op) is ReduceOp:
        return Average if op is None else op
    try:
        return ReduceOp(op)
    except (ValueError, TypeError):
        wanted = ", ".join(f"hvd.{each.name}" for each in ReduceOp)
        raise ValueError(f"op is {shown(op)}, wanted one of {wanted}") from None


def op_or_error(op: Any, average: bool | None) -> Any:
    """Return the reduction that ``op`` and deprecated ``average`` mean, or an error, raised by :func:`checked_op`."""
    if average is None:
        return op
    try:
        if op is not None:
            raise ValueError("op and average are both given; op has replaced average: leave average out")
        warnings.warn("average= has been replaced by op=: hvd.Average or hvd.Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    except Exception as error:  # a foreign object may raise anything
        return error


class Compressor:
    """Compression of tensors before an operation, and its inverse. Derive from it to write one."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return what to send of ``tensor``, and what :meth:`decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor that the received ``tensor`` represents."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Compression that changes nothing."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Compression that casts floating-point tensors to float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return ``tensor`` in float16, if it is floating-point, and its dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return ``tensor`` in its original dtype."""
        return tensor.to(ctx) if tensor.is_floating_point() else tensor


class Compression:
    """Compressions that Horovod has. For others, pass one of pycomm's to ``DistributedOptimizer``."""

    none = NoneCompressor
    fp16 = FP16Compressor


Undo = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


def compressed(tensors: Iterable[torch.Tensor], compression: Any) -> tuple[list[torch.Tensor], Undo]:
    """Return the compressed ``tensors``, and a function that decompresses the tensors received."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    contexts = [context for _, context in pairs]

    def undo(received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [compression.decompress(x, context) for x, context in zip(received, contexts, strict=True)]

    return [tensor for tensor, _ in pairs], undo
