"""Movements beneath the collectives: out of place, along any dimension, in uneven parts.

Arguments are right and sizes known here; empty tensors move nothing, on all ranks alike. :func:`differentiable`
makes functions of them that autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist
from torch.autograd import Function

P = ParamSpec("P")
Move = Callable[Concatenate[torch.Tensor, P], torch.Tensor]
Group = dist.ProcessGroup
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Under its newest name, as torch warns of the older one."""
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Likewise."""


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum of all ranks' ``x``."""
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        dist.all_reduce(out, group=group)
    return out


def gathered(x: torch.Tensor, dim: int, lengths: Sequence[int], group: Group) -> torch.Tensor:
    """Return all ranks' ``x``, which are ``lengths`` long along ``dim``, one after the other along it."""
    rows, longest = x.movedim(dim, 0).contiguous(), max(lengths)
    rest = rows.shape[1:]
    if longest * rest.numel() == 0:
        return rows.new_empty(sum(lengths), *rest).movedim(0, dim)
    if rows.shape[0] < longest:
        rows = torch.cat([rows, rows.new_zeros(longest - rows.shape[0], *rest)])
    out = rows.new_empty(group.size() * longest, *rest)
    all_gather_single(out, rows, group=group)
    if min(lengths) < longest:
        parts = zip(torch.split(out, longest), lengths, strict=True)
        out = torch.cat([part[:length] for part, length in parts])
    return out.movedim(0, dim).contiguous()


def summed_part(x: torch.Tensor, dim: int, lengths: Sequence[int], group: Group) -> torch.Tensor:
    """Return this rank's part of the sum of all ranks' ``x``, of which rank r has ``lengths[r]`` along ``dim``."""
    rows, longest, mine = x.movedim(dim, 0), max(lengths), lengths[group.rank()]
    rest = rows.shape[1:]
    if longest * rest.numel() == 0:
        return rows.new_empty(mine, *rest).movedim(0, dim)
    if min(lengths) < longest:
        padded = rows.new_zeros(group.size(), longest, *rest)
        for part, own in zip(padded, torch.split(rows, list(lengths)), strict=True):
            part[: own.shape[0]] = own
        rows = padded.flatten(0, 1)
    out = rows.new_empty(longest, *rest)
    reduce_scatter_single(out, rows.contiguous(), group=group)
    return out[:mine].movedim(0, dim).contiguous()


def exchanged(x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: Group) -> torch.Tensor:
    """Send ``sends[r]`` rows of ``x`` to rank r, and return ``receives[r]`` rows from it, in the order of ranks."""
    out = x.new_empty(sum(receives), *x.shape[1:])
    if x.shape[1:].numel():  # also without rows here: other ranks may have some
        dist.all_to_all_single(out, x.contiguous(), list(receives), list(sends), group=group)
    return out


def copied(x: torch.Tensor, src: int, group: Group) -> torch.Tensor:
    """Return the ``x`` of rank ``src`` of ``group``."""
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        dist.broadcast(out, dist.get_global_rank(group, src), group=group)
    return out


def summed_on(x: torch.Tensor, dst: int, group: Group) -> torch.Tensor:
    """Return the sum of all ranks' ``x`` on rank ``dst`` of ``group``, and zeros on the others."""
    out = x.clone(memory_format=torch.contiguous_format)
    if out.numel():
        dist.reduce(out, dist.get_global_rank(group, dst), group=group)
    return out if group.rank() == dst else torch.zeros_like(out)


def returned(x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], group: Group) -> torch.Tensor:
    """Return to each rank what :func:`exchanged` has received from it."""
    return exchanged(x, receives, sends, group)


def viewed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return ``x``, as a tensor of its own."""
    return x.view_as(x)


def own_part(x: torch.Tensor, dim: int, lengths: Sequence[int], group: Group) -> torch.Tensor:
    """Return this rank's part of ``x``, of which rank r has ``lengths[r]`` along ``dim``."""
    return torch.split(x, list(lengths), dim)[group.rank()].contiguous()


class _Transposed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, move: Any, transpose: Any, given: Any) -> torch.Tensor:
        ctx.backwards = transpose, move, given
        made: torch.Tensor = move(x, *given)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _apply(grad, *ctx.backwards), None, None, None


_apply: Any = _Transposed.apply


def differentiable(move: Move[P], transpose: Move[P]) -> Move[P]:
    """Return ``move`` as a function that autograd differentiates by ``transpose``. Arguments: by position."""

    def moved(x: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
        assert not kwargs
        made: torch.Tensor = _apply(x, move, transpose, args)
        return made

    return moved
