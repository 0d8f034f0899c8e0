"""Functions between replicated and split tensors, for a loss that all ranks have alike.

Megatron-LM (Shoeybi et al., arXiv:1909.08053, section 3) puts them around the layers that are split. Gradients of
replicated tensors are themselves replicated here, which is where they differ from the collectives of the sum of
all ranks' losses. They announce nothing, as the ranks of a split layer run the same code; but on the backend "pycomm"
the others hear of an error in one rank's arguments all the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function

from pycomm.parallel.functional import moves
from pycomm.parallel.functional.announce import exchange_rows, require_dim, require_tensor
from pycomm.parallel.groups import GroupLike, told
from pycomm.transport.own_group import group_of


def copy_to_group(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Return ``x``, of which each rank then uses something else; its backward sums their gradients.

    Megatron's f: in front of a layer that is split by columns.
    """
    require_tensor(x)
    return _result(_Copy.apply(x, group_of(group)))  # type: ignore[no-untyped-call]


def reduce_from_group(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Return the sum of all ranks' ``x``; its backward hands the gradient on as it is.

    Megatron's g: behind a layer that is split by rows.
    """
    ranks = group_of(group)
    told(ranks, lambda: require_tensor(x))
    return _result(_Sum.apply(x, ranks))  # type: ignore[no-untyped-call]


def scatter_to_group(x: torch.Tensor, dim: int = -1, group: GroupLike = None) -> torch.Tensor:
    """Return this rank's part of the replicated ``x`` along ``dim``; its backward gathers the gradients.

    Parts are equal, or as ``torch.chunk`` makes them, but exactly one per rank: the last ones may be empty.
    """
    dim, found = require_dim(x, dim), group_of(group)
    part = -(-x.shape[dim] // found.size())
    lengths = [max(0, min(part, x.shape[dim] - part * rank)) for rank in range(found.size())]
    return _result(_Scatter.apply(x, dim, lengths, found))  # type: ignore[no-untyped-call]


def gather_from_group(x: torch.Tensor, dim: int = -1, group: GroupLike = None, *, even: bool = False) -> torch.Tensor:
    """Return all ranks' ``x``, one after the other along ``dim``; its backward takes this rank's part.

    Args:
        x: tensor of the same shape and dtype on all ranks, but for its length along ``dim``.
        dim: the dimension; counted from the end if it is negative.
        group: a group, a one-dimensional ``DeviceMesh``, or ``None`` for the default group.
        even: whether the lengths are known to be equal, so that the ranks need not tell them to each other first.
    """
    ranks = group_of(group)
    dim = told(ranks, lambda: require_dim(x, dim))
    lengths = [x.shape[dim]] * ranks.size()
    if not even:
        lengths = [row[0] for row in exchange_rows(torch.tensor([x.shape[dim]]), ranks, x.device)]
    return _result(_Gather.apply(x, dim, lengths, ranks))  # type: ignore[no-untyped-call]


def gather_along(x: torch.Tensor, dim: int, lengths: list[int], ranks: dist.ProcessGroup) -> torch.Tensor:
    """Do the work of :func:`gather_from_group` where the ranks know already how long their tensors are along ``dim``.

    ``dim`` is counted from the front.
    """
    return _result(_Gather.apply(x, dim, lengths, ranks))  # type: ignore[no-untyped-call]


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Sum.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return moves.summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Copy.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.given = dim, lengths, group
        return torch.split(x, lengths, dim)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Gather.apply(grad, *ctx.given), None, None, None  # type: ignore[no-untyped-call]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, lengths: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.given = dim, lengths, group
        return moves.gathered(x, dim, lengths, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Scatter.apply(grad, *ctx.given), None, None, None  # type: ignore[no-untyped-call]


def _result(out: Any) -> torch.Tensor:
    assert isinstance(out, torch.Tensor)
    return out
