"""Collectives of the sum of all ranks' losses; see :mod:`pycomm.parallel.functional`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm.checks import count, length, reduction, shown
from pycomm.collectives.transport.own_group import found_group, group_of
from pycomm.errors import attempt
from pycomm.parallel.functional import moves
from pycomm.parallel.functional.moves import (
    Announcements,
    Call,
    announce,
    differentiable,
    exchange_rows,
    require_dim,
    require_tensor,
)
from pycomm.parallel.mesh import GroupLike, reporting

_OPS = ("sum", "mean")

_all_reduce = differentiable(moves.summed, moves.summed)
_all_gather = differentiable(moves.gathered, moves.summed_part)
_reduce_scatter = differentiable(moves.summed_part, moves.gathered)
_all_to_all = differentiable(moves.exchanged, moves.returned)
_broadcast = differentiable(moves.copied, moves.summed_on)
_reduce = differentiable(moves.summed_on, moves.copied)


def all_reduce(x: torch.Tensor, op: str = "sum", group: GroupLike = None) -> torch.Tensor:
    """Return the sum, or the mean, of all ranks' ``x``; its backward is an all-reduce of the gradients.

    Args:
        x: tensor of the same shape and dtype on all ranks; any strides, empty ones too.
        op: "sum" or "mean" (of floating-point and complex tensors; "avg" is the same).
        group: a group, a one-dimensional ``DeviceMesh``, or ``None`` for the default group.

    Raises:
        TypeError, ValueError: an argument is wrong, or the ranks' differ (on every rank, before data moves).
    """

    op = reduction(op)

    def call() -> Call:
        require_tensor(x)
        if op not in _OPS:
            raise ValueError(f"op is {shown(op)}, wanted one of {', '.join(_OPS)}")
        if op == "mean" and not (x.is_floating_point() or x.is_complex()):
            raise TypeError(f"x has the dtype {x.dtype}, of which there is no mean")
        return Call("all_reduce", x, argument=_OPS.index(op))

    ranks, announced = _agreed("all_reduce", call, x, group)
    out = _all_reduce(_tied(x, announced), ranks)
    return out / ranks.size() if op == "mean" else out


def all_gather(x: torch.Tensor, dim: int = 0, group: GroupLike = None) -> torch.Tensor:
    """Return all ranks' ``x``, one after the other along ``dim``; its backward is a reduce-scatter.

    Args:
        x: tensor of the same shape and dtype on all ranks, but for its length along ``dim``.
        dim: the dimension; counted from the end if it is negative.
        group: as for :func:`all_reduce`.

    Raises:
        TypeError, ValueError: as from :func:`all_reduce`.
    """

    def call() -> Call:
        d = require_dim(x, dim)
        return Call("all_gather", x, argument=d, free_dim=d)

    ranks, announced = _agreed("all_gather", call, x, group)
    return _all_gather(_tied(x, announced), dim % x.dim(), announced.lengths, ranks)


def reduce_scatter(
    x: torch.Tensor, dim: int = 0, group: GroupLike = None, *, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum of all ranks' ``x``; its backward is an all-gather.

    Args:
        x: tensor of the same shape and dtype on all ranks.
        dim: the dimension; counted from the end if it is negative.
        group: as for :func:`all_reduce`.
        sizes: length of each rank's part, the same list on all ranks; equal parts if ``None``.

    Raises:
        TypeError, ValueError: as from :func:`all_reduce`; or ``x`` cannot be cut so.
    """

    def call() -> Call:
        d = require_dim(x, dim)
        return Call("reduce_scatter", x, argument=d, sizes=_cut("sizes", sizes, x.shape[d], group_of(group).size()))

    ranks, announced = _agreed("reduce_scatter", call, x, group)
    if any(row != announced.sizes[0] for row in announced.sizes):
        raise ValueError(f"the ranks disagree on sizes: {announced.sizes}")
    own = ranks.rank()
    return _reduce_scatter(_tied(x, announced), dim % x.dim(), announced.sizes[own], ranks)


def all_to_all(x: torch.Tensor, sizes: Sequence[int] | None = None, group: GroupLike = None) -> torch.Tensor:
    """Send rows of ``x`` to the other ranks, and return theirs, in the order of ranks; its own backward.

    Args:
        x: tensor of one dimension or more; the same shape and dtype on all ranks, but for the number of rows.
        sizes: number of rows for each rank, in their order in ``x``; equal ones if ``None``. The numbers of rows
            that this rank receives are found out by the announcement.
        group: as for :func:`all_reduce`.

    Raises:
        TypeError, ValueError: as from :func:`all_reduce`; or ``x`` cannot be cut so.
    """

    def call() -> Call:
        require_tensor(x, 0)
        return Call("all_to_all", x, sizes=_cut("sizes", sizes, x.shape[0], group_of(group).size()), free_dim=0)

    ranks, announced = _agreed("all_to_all", call, x, group)
    own = ranks.rank()
    receives = [row[own] for row in announced.sizes]
    return _all_to_all(_tied(x, announced), announced.sizes[own], receives, ranks)


def broadcast(x: torch.Tensor, src: int, group: GroupLike = None) -> torch.Tensor:
    """Return the ``x`` of rank ``src``; its backward is a reduce, which leaves zeros on the other ranks.

    Args:
        x: tensor of the same shape and dtype on all ranks; only the one on ``src`` is read.
        src: rank in the group.
        group: as for :func:`all_reduce`.

    Raises:
        TypeError, ValueError: as from :func:`all_reduce`; or there is no such rank.
    """
    ranks, announced = _agreed("broadcast", lambda: _rooted("broadcast", "src", x, src, group), x, group)
    return _broadcast(_tied(x, announced), src, ranks)


def reduce(x: torch.Tensor, dst: int, group: GroupLike = None) -> torch.Tensor:
    """Return the sum of all ranks' ``x`` on rank ``dst``, and zeros on the others; its backward is a broadcast.

    All ranks have to take part in the backward pass: those that have no use for the zeros tie them to their loss
    (:func:`pycomm.parallel.functional.tie`).

    Args:
        x: tensor of the same shape and dtype on all ranks.
        dst: rank in the group.
        group: as for :func:`all_reduce`.

    Raises:
        TypeError, ValueError: as from :func:`all_reduce`; or there is no such rank.
    """
    ranks, announced = _agreed("reduce", lambda: _rooted("reduce", "dst", x, dst, group), x, group)
    return _reduce(_tied(x, announced), dst, ranks)


def _agreed(name: str, call: Callable[[], Call], x: Any, group: GroupLike) -> tuple[dist.ProcessGroup, Announcements]:
    ranks, problem = found_group(lambda: group_of(group))
    device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
    return ranks, announce(name, attempt(call, problem), ranks, device)


def _tied(x: torch.Tensor, announced: Announcements) -> torch.Tensor:
    """Return ``x``, as part of a graph if another rank's is: all of them have to take part in the backward pass."""
    if announced.needs_gradient and torch.is_grad_enabled() and not x.requires_grad:
        return x.detach().requires_grad_()
    return x


def _rooted(name: str, argument: str, x: torch.Tensor, root: int, group: GroupLike) -> Call:
    require_tensor(x)
    size = group_of(group).size()
    if count(argument, root, 0) >= size:
        raise ValueError(f"{argument} is {root}, wanted a rank below {size}, in the group")
    return Call(name, x, argument=root)


def _cut(name: str, sizes: Sequence[int] | None, whole: int, ranks: int) -> tuple[int, ...]:
    if sizes is None:
        if whole % ranks:
            raise ValueError(f"x is {whole} long, which {ranks} ranks cannot share evenly: pass {name}")
        return (whole // ranks,) * ranks
    if length(name, sizes) != ranks or sum(count(name, size, 0) for size in sizes) != whole:
        raise ValueError(f"{name} is {list(sizes)}, wanted {ranks} numbers with the sum {whole}")
    return tuple(int(size) for size in sizes)


# Functions between replicated and split tensors, for a loss that is the same on all ranks.
#
# Megatron-LM (Shoeybi et al., arXiv:1909.08053, section 3) puts them around split layers. Unlike with the collectives
# of the sum of all ranks' losses, gradients of replicated tensors are themselves replicated. They announce nothing, as
# the ranks of a split layer run the same code; but on the backend "pycomm", the other ranks get an error in one's
# arguments.

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
