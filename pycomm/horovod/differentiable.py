"""Operations that return their results, and that autograd differentiates.

The gradients are Horovod's: each rank's loss counts as a part of an average over the ranks. So gather's and broadcast's
gradients are averaged over the ranks, a reduction's is reduced as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycomm.horovod.compression import Compression
from pycomm.horovod.handles import Submission, grouped, single
from pycomm.horovod.operations import (
    Tensors,
    received_of,
    submit_allgather,
    submit_allreduce,
    submit_alltoall,
    submit_broadcast,
    submit_reducescatter,
    waited,
)
from pycomm.horovod.process_sets import ProcessSet, global_process_set
from pycomm.horovod.reduce_ops import Average, Sum, checked_op
from pycomm.horovod.requests import ALLREDUCE, REDUCESCATTER
from pycomm.horovod.state import world

Settings = tuple[str | None, Any, tuple[float, float], ProcessSet]
"""Name, reduction, factors and process set of a reduction."""


def _differentiates(tensors: Any) -> bool:
    if not torch.is_grad_enabled() or not isinstance(tensors, Sequence):
        return False
    try:
        return any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
    except Exception:  # a foreign object may raise anything; so it does again where the other ranks can be told
        return False


def _reduce(tensors: Any, settings: Settings) -> tuple[torch.Tensor, ...]:
    name, op, factors, process_set = settings
    return grouped(waited(submit_allreduce(tensors, name, op, factors, process_set, wake=False)))


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Settings, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.settings = settings
        return _reduce(tensors, settings)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *_reduce(grads, (None, *ctx.settings[1:]))


_all_reduce: Any = _AllReduce.apply


def _chosen(op: Any, average: bool | None = None) -> Any:
    """Return the reduction, or the error that the arguments are, which is raised where the other ranks can be told."""
    try:
        return checked_op(op, average)
    except Exception as error:  # a foreign object may raise anything
        return error


def _compressed(kind: str, tensors: Any, compression: Any, settings: Settings) -> list[tuple[torch.Tensor, Any]]:
    """Return the compressed tensors, each with what undoes it. An error is one of the operation, on all ranks."""
    try:
        return [compression.compress(tensor) for tensor in tensors]
    except Exception:  # users write compressions
        name, _, _, process_set = settings
        with Submission(kind, name, process_set):
            raise


def _all_reduced(tensors: Any, compression: Any, settings: Settings) -> list[torch.Tensor]:
    if compression is not Compression.none:
        pairs = _compressed(ALLREDUCE, tensors, compression, settings)
        reduced = _all_reduced([tensor for tensor, _ in pairs], Compression.none, settings)
        return [compression.decompress(x, context) for x, (_, context) in zip(reduced, pairs, strict=True)]
    if _differentiates(tensors):
        return list(_all_reduce(settings, *tensors))
    return list(_reduce(tensors, settings))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of ``tensor`` over the ranks. Autograd differentiates it.

    Args:
        tensor: of any shape, the same on all ranks; of floating-point, integer, complex or boolean dtype.
        average: what ``op`` has replaced.
        name: by which the ranks match the operation, in any order; a number if ``None``.
        compression: ``Compression.none`` or ``.fp16``, or a class with the same methods.
        op: ``Average`` (of integers cut off), ``Sum``, ``Min``, ``Max``, ``Product``, ``Adasum``; Average if ``None``.
        prescale_factor, postscale_factor: factors before and after the reduction; of integers computed in float64 and
            cut off, of half types computed in float32.
        process_set: the ranks.

    Raises:
        InvalidRequestError: an argument is wrong, or the ranks disagree: on every rank, and the ranks go on.
        HorovodInternalError: a rank is lost.
        ValueError: before ``init()``; or an operation of that name is not done yet.
    """
    settings = (name, _chosen(op, average), (prescale_factor, postscale_factor), process_set)
    return _all_reduced([tensor], compression, settings)[0]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reductions of ``tensors`` over the ranks, of all or of none. See :func:`allreduce`."""
    settings = (name, _chosen(op, average), (prescale_factor, postscale_factor), process_set)
    return _all_reduced(tensors, compression, settings)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        request = waited(submit_allgather(tensors, name, process_set, wake=False))
        ctx.parts, ctx.process_set = request.parts, process_set
        return grouped(request)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        rank = ctx.process_set.rank()
        averages = _reduce(grads, (None, Average, (1.0, 1.0), ctx.process_set))
        mine = [x.narrow(0, sum(p[:rank]), p[rank]) for x, p in zip(averages, ctx.parts, strict=True)]
        return None, None, *mine


_all_gather: Any = _AllGather.apply


def _all_gathered(tensors: Any, name: str | None, process_set: ProcessSet) -> list[torch.Tensor]:
    if _differentiates(tensors):
        return list(_all_gather(name, process_set, *tensors))
    return list(grouped(waited(submit_allgather(tensors, name, process_set, wake=False))))


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the rows of all ranks' ``tensor``, in rank order. Autograd differentiates it.

    ``tensor`` has one dimension or more, of which only the first may differ between ranks; any dtype. Errors: as of
    :func:`allreduce`.
    """
    return _all_gathered([tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Return the rows of all ranks, of each of ``tensors``. See :func:`allgather`."""
    return _all_gathered(tensors, name, process_set)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return single(waited(submit_broadcast(tensor, root_rank, name, process_set, False, wake=False)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        average = _reduce([grad], (None, Average, (1.0, 1.0), ctx.process_set))[0]
        return average if world().rank == ctx.root_rank else torch.zeros_like(average), None, None, None


_broadcast: Any = _Broadcast.apply


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the ``tensor`` of the global rank ``root_rank``. Autograd differentiates it.

    Shape and dtype, any, are the same on all ranks. Errors: as of :func:`allreduce`.
    """
    if _differentiates([tensor]):
        made: torch.Tensor = _broadcast(tensor, root_rank, name, process_set)
        return made
    return single(waited(submit_broadcast(tensor, root_rank, name, process_set, False, wake=False)))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        request = waited(submit_alltoall(tensor, splits, name, process_set, wake=False))
        ctx.received, ctx.process_set, ctx.rows = request.result, process_set, tensor.shape[0]
        output, received = received_of(request, splits)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        mine = single(waited(submit_alltoall(grad, ctx.received, None, ctx.process_set, wake=False)))
        rest = ctx.rows - mine.shape[0]  # rows that went to nobody
        if rest:
            mine = torch.cat([mine, mine.new_zeros(rest, *mine.shape[1:])])
        return mine, None, None, None


_all_to_all: Any = _AllToAll.apply


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank, and return those that come, in rank order. Autograd differentiates it.

    Args:
        tensor: rows in the order of the ranks that they go to; dimensions but the first, and any dtype, are the same on
            all ranks.
        splits: how many rows go to each rank: a tensor or list of integers, none negative. Equally many if ``None``.
        name, process_set: as of :func:`allreduce`.

    Returns:
        The rows; if ``splits`` is given, also how many have come from each rank, a tensor like ``splits`` (of int32 if
        that is none).

    Raises:
        InvalidRequestError and others: as of :func:`allreduce`.
    """
    if _differentiates([tensor]):
        output, received = _all_to_all(tensor, splits, name, process_set)
    else:
        output, received = received_of(waited(submit_alltoall(tensor, splits, name, process_set, wake=False)), splits)
    return output if splits is None else (output, received)


def _scatter(tensors: Any, settings: Settings) -> tuple[torch.Tensor, ...]:
    name, op, factors, process_set = settings
    return grouped(waited(submit_reducescatter(tensors, name, op, factors, process_set, wake=False)))


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Settings, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.settings = settings
        return _scatter(tensors, settings)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _, op, (before, after), process_set = ctx.settings
        factor = before * after * ((process_set.size() or 1) if op == Sum else 1)
        return None, *_all_gathered([grad * factor for grad in grads], None, process_set)


_reduce_scatter: Any = _ReduceScatter.apply


def _reduce_scattered(tensors: Any, compression: Any, settings: Settings) -> list[torch.Tensor]:
    if compression is not Compression.none:
        pairs = _compressed(REDUCESCATTER, tensors, compression, settings)
        reduced = _reduce_scattered([tensor for tensor, _ in pairs], Compression.none, settings)
        return [compression.decompress(x, context) for x, (_, context) in zip(reduced, pairs, strict=True)]
    if _differentiates(tensors):
        return list(_reduce_scatter(settings, *tensors))
    return list(_scatter(tensors, settings))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction of ``tensor`` over the ranks. Autograd differentiates it.

    Of n rows, each of P ranks gets n // P, the first n % P ranks one more. Arguments and errors: as of
    :func:`allreduce`, without Adasum.
    """
    settings = (name, _chosen(op), (prescale_factor, postscale_factor), process_set)
    return _reduce_scattered([tensor], compression, settings)[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of the reductions of ``tensors`` over the ranks. See :func:`reducescatter`."""
    settings = (name, _chosen(op), (prescale_factor, postscale_factor), process_set)
    return _reduce_scattered(tensors, compression, settings)
