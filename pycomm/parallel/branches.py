"""Models with several branches, one per rank: a detector's heads, AlexNet's two halves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from pycomm.checks import integer
from pycomm.collectives.transport.own_group import found_group, group_of
from pycomm.errors import attempt
from pycomm.parallel.functional import all_gather, copy_to_group, reduce_from_group
from pycomm.parallel.functional.collectives import gather_along
from pycomm.parallel.functional.moves import MOST_DIMENSIONS, agreed_rows, number_of, require_tensor
from pycomm.parallel.mesh import GroupLike, agree

_COMBINATIONS = ("list", "concatenate", "sum", "own")


class Branches(nn.Module):
    """Branches of a model, one for each rank of a group, which computes this branch only.

    All ranks of the group call it with the same inputs, and get all branches' outputs; the code before and after runs
    on all of them. The gradients of the inputs are summed over the branches, as in one process::

        heads = pycomm.parallel.Branches([make_classes, make_boxes], group=mesh["tp"])
        classes, boxes = heads(trunk(images))

    Branches that use each other's features have an :class:`Exchange` at that point. Average gradients over the ranks
    with the same branch (``attach(..., process_group=mesh["dp"])``). Construction is collective.

    Args:
        make_branches: functions that make the branches, one for each rank. Every rank calls all of them in order and
            keeps its own branch, so that equal seeds give the same branches as in one process.
        group: a group, a one-dimensional ``DeviceMesh``, or ``None`` for the default group.
        combine: "list": return all branches' outputs, of any shapes, in a tuple; "concatenate": one after the other
            along ``dim``; "sum": their sum; "own": return only this rank's, for branches with losses of their own
            (each rank then differentiates its own loss, and gradients are taken of the sum of these).
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
        self._group, problem = found_group(lambda: group_of(group))  # not part of the state
        size, rank = self._group.size(), self._group.rank()
        given = attempt(lambda: _checked(make_branches, combine, dim, size), problem)
        makers = agree(self._group, given, "make these branches", lambda _: [f"combine = {combine!r}", f"dim = {dim}"])
        self.combine, self.dim = combine, dim
        made = agree(self._group, attempt(lambda: [_made(make) for make in makers]), "make its branches")
        self.own = nn.ModuleDict({str(rank): made[rank]})

    def forward(self, *inputs: Any) -> Any:
        """Return the outputs of the branches, combined; tensors in ``inputs`` are the same on all ranks.

        Raises:
            TypeError, ValueError: the ranks' inputs differ in shape or dtype, or in whether they need a gradient; a
                branch fails, or returns no tensor, or tensors that cannot be combined (on every rank).
        """
        made = attempt(lambda: self._own_output(inputs))
        out, numbers, form = (None, made, "") if isinstance(made, Exception) else made
        device = out.device if isinstance(out, torch.Tensor) else torch.device("cpu")
        rows = agreed_rows(self._group, numbers, 2 + MOST_DIMENSIONS, "compute its branch", device, form)
        if self.combine == "own":
            return out
        assert isinstance(out, torch.Tensor)
        shapes = [row[2 : 2 + row[1]] for row in rows]
        self._require_fit(shapes, [row[0] for row in rows])
        if self.combine == "sum":
            return reduce_from_group(out, self._group)
        if self.combine == "list":
            whole = gather_along(out.flatten(), 0, [math.prod(shape) for shape in shapes], self._group)
            parts = torch.split(whole, [math.prod(shape) for shape in shapes])
            return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        dim = self.dim % out.dim()
        return gather_along(out, dim, [shape[dim] for shape in shapes], self._group)

    def _own_output(self, inputs: Sequence[Any]) -> tuple[Any, list[int], str]:
        """Return this rank's output for ``inputs``, its dtype and shape as numbers, and a description of the inputs."""
        shared = [copy_to_group(x, self._group) if _has_gradient(x) else x for x in inputs]
        (branch,) = self.own.values()
        out = branch(*shared)
        if self.combine == "own":
            return out, [], _form_of(inputs)
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"a branch returned a {type(out).__name__}, wanted a tensor")
        require_tensor(out, self.dim if self.combine == "concatenate" else None)
        return out, [number_of(out.dtype), out.dim(), *out.shape], _form_of(inputs)

    def _require_fit(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[int]) -> None:
        """Raise ValueError unless the outputs of all branches can be combined."""
        for rank, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            if dtype != dtypes[0]:
                raise ValueError(f"branch {rank} has another dtype than branch 0")
            free = self.dim % len(shape) if self.combine == "concatenate" and shape else None
            pairs = list(itertools.zip_longest(shapes[0], shape))
            if self.combine != "list" and any(a != b for d, (a, b) in enumerate(pairs) if d != free):
                raise ValueError(
                    f"branches cannot be combined by {self.combine!r}: branch 0 has the shape {shapes[0]}, branch "
                    f"{rank} {shape}"
                )

    def extra_repr(self) -> str:
        """Return the settings, for ``print(model)``."""
        return f"branches={self._group.size()}, combine={self.combine!r}"


class Exchange(nn.Module):
    """Layer inside branches that gives each of them the features of all, as before AlexNet's third layer.

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


def _form_of(inputs: Sequence[Any]) -> str:
    """Describe ``inputs``; if ranks differed in this, some would wait in backward and others not."""
    return ", ".join(_form(x) if isinstance(x, torch.Tensor) else "no tensor" for x in inputs)


def _form(x: torch.Tensor) -> str:
    shape = "nested" if x.is_nested else list(x.shape)
    return f"{shape} {x.dtype} {x.layout} on {x.device.type}{', needs a gradient' if x.requires_grad else ''}"


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _checked(make_branches: Any, combine: Any, dim: Any, ranks: int) -> list[Callable[[], nn.Module]]:
    """Return ``make_branches`` as a list. Raises TypeError or ValueError if an argument of Branches is wrong."""
    if not isinstance(make_branches, Sequence) or not all(callable(make) for make in make_branches):
        raise TypeError("make_branches is not a sequence of functions without arguments")
    if len(make_branches) != ranks:
        raise ValueError(f"make_branches has {len(make_branches)} branches, wanted one for each of {ranks} ranks")
    if not isinstance(combine, str) or combine not in _COMBINATIONS:
        raise ValueError(f"combine is {combine!r}, wanted one of {', '.join(_COMBINATIONS)}")
    integer("dim", dim, -MOST_DIMENSIONS, MOST_DIMENSIONS - 1)
    return list(make_branches)


def _made(make: Callable[[], nn.Module]) -> nn.Module:
    made = make()
    if not isinstance(made, nn.Module):
        raise TypeError(f"make_branches made a {type(made).__name__}, wanted a torch.nn.Module")
    return made
