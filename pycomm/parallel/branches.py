"""Models with several branches, each on a rank of its own: a detector's heads, AlexNet's two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.parallel.functional import all_gather, copy_to_group, gather_from_group, reduce_from_group
from pycomm.parallel.functional.announce import (
    Call,
    announce,
    checked,
    exchange_rows,
    require_tensor,
)
from pycomm.parallel.functional.collectives import GroupLike
from pycomm.transport.own_group import group_of

_COMBINATIONS = ("list", "concatenate", "sum", "own")
_MOST_DIMENSIONS = 12


class Branches(nn.Module):
    """Branches of a model, of which each rank of a group has one, and computes only that.

    All ranks of the group call it with the same inputs, and get all branches' outputs; whatever comes before and
    after runs on all of them alike. The gradients of the inputs are summed over the branches, as in one process::

        heads = pycomm.parallel.Branches([make_classes, make_boxes], group=mesh["tp"])
        classes, boxes = heads(trunk(images))

    Branches that look at each other's features in the middle have an :class:`Exchange` there. Average gradients over
    ranks that have the same branch (``attach(..., process_group=mesh["dp"])``). Construction is collective.

    Args:
        make_branches: makes each branch, one for each rank. Every rank makes all of them, one after the other, and
            keeps its own, so that equal seeds give the same branches as one process has.
        group: a group, a one-dimensional ``DeviceMesh``, or ``None`` for the default group.
        combine: "list": return all branches' outputs, of any shapes, in a tuple; "concatenate": one after the other
            along ``dim``; "sum": their sum; "own": return only this rank's, for branches with losses of their own
            (each rank differentiates its own loss then, and gradients are those of the sum).
        dim: dimension for "concatenate".

    Attributes:
        own: this rank's branch, under its number among all.

    Raises:
        TypeError, ValueError: an argument is wrong, or the ranks' differ (on every rank).
    """

    def __init__(
        self,
        make_branches: Sequence[Callable[[], nn.Module]],
        group: GroupLike = None,
        *,
        combine: str = "list",
        dim: int = -1,
    ) -> None:
        super().__init__()
        self._group = group_of(group)  # not part of the state
        error = _wrong(make_branches, combine, dim, self._group.size())
        settings = [1, 0, 0] if error else [0, _COMBINATIONS.index(combine), dim]
        rows = exchange_rows(torch.tensor(settings), self._group, torch.device("cpu"))
        if error is not None:
            raise error
        for rank, row in enumerate(rows):
            if row[0]:
                raise ValueError(f"rank {rank} gave Branches a wrong argument")
            if row != rows[0]:
                raise ValueError(f"rank {rank} combines branches in another way, or along another dim, than rank 0")
        self.combine, self.dim = combine, dim
        made = [make() for make in make_branches]
        self.own = nn.ModuleDict({str(self._group.rank()): made[self._group.rank()]})

    def forward(self, *inputs: Any) -> Any:
        """Return the outputs of the branches, combined; tensors in ``inputs`` are the same on all ranks.

        Raises:
            TypeError, ValueError: a branch returns no tensor, or tensors that cannot be combined (on every rank).
        """
        shared = [copy_to_group(x, self._group) if _has_gradient(x) else x for x in inputs]
        (branch,) = self.own.values()
        out = branch(*shared)
        if self.combine == "own":
            return out
        if self.combine == "list":
            return _gathered_list(out, self._group)
        device = out.device if isinstance(out, torch.Tensor) else torch.device("cpu")
        if self.combine == "sum":
            announce("all_reduce", checked(lambda: _call("all_reduce", out, None)), self._group, device)
            return reduce_from_group(out, self._group)
        announce("all_gather", checked(lambda: _call("all_gather", out, self.dim)), self._group, device)
        return gather_from_group(out, self.dim, self._group)

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        return f"branches={self._group.size()}, combine={self.combine!r}"


class Exchange(nn.Module):
    """Point in the middle of branches where each gets the features of all, as in the third layer of AlexNet.

    Krizhevsky et al., "ImageNet classification with deep convolutional neural networks" (2012), section 3.5. The
    branches concatenate their tensors along ``dim``, in the order of ranks; the gradients of all go back to
    each. All branches need the same exchanges, in the same order.

    Args:
        group: the group of the :class:`Branches`.
        dim: dimension of the features; 1 for channels.
    """

    def __init__(self, group: GroupLike = None, dim: int = 1) -> None:
        super().__init__()
        self._group, self.dim = group_of(group), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all branches, one after the other.

        Raises:
            TypeError, ValueError: the branches' tensors do not fit together (on every rank).
        """
        return all_gather(x, self.dim, self._group)


def _gathered_list(out: Any, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Return the tensors of all ranks, of any shapes but one dtype."""
    call = checked(lambda: _call("all_gather", out.flatten() if isinstance(out, torch.Tensor) else out, 0))
    announce("all_gather", call, group, out.device if isinstance(out, torch.Tensor) else torch.device("cpu"))
    mine = torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64)
    mine[: 1 + out.dim()] = torch.tensor([out.dim(), *out.shape])
    shapes = [row[1 : 1 + row[0]] for row in exchange_rows(mine, group, out.device)]
    whole = gather_from_group(out.flatten(), 0, group)
    parts = torch.split(whole, [torch.Size(shape).numel() for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _call(name: str, out: Any, dim: int | None) -> Call:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"a branch returned a {type(out).__name__}, wanted a tensor")
    free = None if dim is None else require_tensor(out, dim)
    require_tensor(out)
    return Call(name, out, argument=free or 0, free_dim=free)


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _wrong(make_branches: Any, combine: Any, dim: Any, ranks: int) -> Exception | None:
    """Return the error in the arguments of Branches; ``None`` if there is none."""
    if not isinstance(make_branches, Sequence) or not all(callable(make) for make in make_branches):
        return TypeError("make_branches is no sequence of functions without arguments")
    if len(make_branches) != ranks:
        return ValueError(f"make_branches has {len(make_branches)} branches, wanted one for each of {ranks} ranks")
    if combine not in _COMBINATIONS:
        return ValueError(f"combine is {combine!r}, wanted one of {', '.join(_COMBINATIONS)}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        return TypeError(f"dim is {dim!r}, wanted an int")
    return None
