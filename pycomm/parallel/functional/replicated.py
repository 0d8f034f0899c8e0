"""Functions between replicated and split tensors, for a loss that is the same on all ranks.

Megatron-LM (Shoeybi et al., arXiv:1909.08053, section 3) puts them around split layers. Unlike with the collectives of
the sum of all ranks' losses, gradients of replicated tensors are themselves replicated. They announce nothing, as the
ranks of a split layer run the same code; but on the backend "pycomm", the other ranks get an error in one's arguments.
"""

from __future__ import annotations

import torch

from pycomm.collectives.transport.own_group import group_of
from pycomm.parallel.functional import moves
from pycomm.parallel.functional.announce import exchange_rows, require_dim, require_tensor
from pycomm.parallel.functional.moves import differentiable
from pycomm.parallel.groups import GroupLike, reporting

_copy = differentiable(moves.viewed, moves.summed)
_sum = differentiable(moves.summed, moves.viewed)
_scatter = differentiable(moves.own_part, moves.gathered)
gather_along = differentiable(moves.gathered, moves.own_part)
""":func:`gather_from_group` of a tensor along a dimension, counted from the front, by lengths that all ranks know."""


def copy_to_group(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Return ``x``; its backward sums the ranks' gradients.

    Megatron's f: in front of a layer that is split by columns.
    """
    require_tensor(x)
    return _copy(x, group_of(group))


def reduce_from_group(x: torch.Tensor, group: GroupLike = None) -> torch.Tensor:
    """Return the sum of all ranks' ``x``; its backward hands the gradient on as it is.

    Megatron's g: behind a layer that is split by rows.
    """
    ranks = group_of(group)
    reporting(ranks, lambda: require_tensor(x))
    return _sum(x, ranks)


def scatter_to_group(x: torch.Tensor, dim: int = -1, group: GroupLike = None) -> torch.Tensor:
    """Return this rank's part of the replicated ``x`` along ``dim``; its backward gathers the gradients.

    Parts are equal, or as ``torch.chunk`` makes them, but exactly one per rank: the last ones may be empty.
    """
    dim, found = require_dim(x, dim), group_of(group)
    part = -(-x.shape[dim] // found.size())
    lengths = [max(0, min(part, x.shape[dim] - part * rank)) for rank in range(found.size())]
    return _scatter(x, dim, lengths, found)


def gather_from_group(x: torch.Tensor, dim: int = -1, group: GroupLike = None, *, even: bool = False) -> torch.Tensor:
    """Return all ranks' ``x``, one after the other along ``dim``; its backward takes this rank's part.

    Args:
        x: tensor of the same shape and dtype on all ranks, but for its length along ``dim``.
        dim: the dimension; counted from the end if it is negative.
        group: a group, a one-dimensional ``DeviceMesh``, or ``None`` for the default group.
        even: whether the lengths are known to be equal, so that the ranks need not exchange them first.
    """
    ranks = group_of(group)
    dim = reporting(ranks, lambda: require_dim(x, dim))
    lengths = [x.shape[dim]] * ranks.size()
    if not even:
        lengths = [row[0] for row in exchange_rows(torch.tensor([x.shape[dim]]), ranks, x.device)]
    return gather_along(x, dim, lengths, ranks)
