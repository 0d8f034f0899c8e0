"""Gradients one by one, by name: of sparse gradients, other reductions than mean and sum, and users' compressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import pycomm.compression as methods
from pycomm.horovod.arguments import Arguments
from pycomm.horovod.compression import Compression
from pycomm.horovod.handles import synchronize
from pycomm.horovod.operations import grouped_allreduce_async_
from pycomm.horovod.pieces import pieces
from pycomm.horovod.process_sets import members_of
from pycomm.horovod.reduce_ops import Adasum, Average, Sum
from pycomm.horovod.sparse_reduction import sparse_allreduce_async
from pycomm.optim.wrappers import refuse_wrapped
from pycomm.reducer import broadcast_optimizer_state, broadcast_parameters

_TOO_OFTEN = (
    "the gradient of {name!r} was computed more than backward_passes_per_step={passes} times before step(): pass a "
    "larger backward_passes_per_step, or call zero_grad() and step() in between"
)


def is_needed(arguments: Arguments) -> bool:
    """Return whether gradients have to go one by one, if none is sparse."""
    own = isinstance(arguments.compression, methods.Compression | str) or arguments.compression is None
    known = own or arguments.compression in (Compression.none, Compression.fp16)
    return arguments.op not in (Average, Sum) or arguments.sparse_as_dense or not known


class NamedAveraging:
    """Averaging of the gradients of ``optimizer`` by named operations, which begin while ``backward()`` runs.

    Args:
        optimizer: whose parameters' gradients are reduced.
        arguments: of ``DistributedOptimizer``.
        sparse: the parameters whose gradients are known to be sparse.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, arguments: Arguments, sparse: set[torch.Tensor]) -> None:
        if isinstance(arguments.compression, methods.Compression | str):
            raise ValueError(
                f"compression is {arguments.compression!r}, which wants op=Average or Sum and dense gradients"
            )
        refuse_wrapped(dict(arguments.named), None)
        self._arguments, self._passes, self._sparse = arguments, arguments.passes, set(sparse)
        self._compression = arguments.compression or Compression.none
        self._names = {id(param): name for name, param in arguments.named}
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._params = [param for _, param in arguments.named if id(param) in own]
        self._groups = {id(param): group for group in self._split() for param in group}
        self._counts: dict[int, int] = {}
        self._begun: dict[int, Callable[[], None]] = {}
        _make_equal(optimizer, arguments)
        self._hooks: dict[int, Any] = {}
        self._listen()

    def _listen(self) -> None:
        """Listen to the gradients of parameters that have some, those that have been unfrozen too."""
        for param in self._params:
            leaf: Any = param
            if leaf.is_leaf and leaf.requires_grad and id(leaf) not in self._hooks:
                self._hooks[id(leaf)] = leaf.register_post_accumulate_grad_hook(self._on_gradient)

    def _split(self) -> list[list[torch.Tensor]]:
        """Return the groups of parameters that are reduced together."""
        groups = self._arguments.groups
        dense = [param for param in self._params if param not in self._sparse]
        if isinstance(groups, list):
            chosen = [[p for p in group if any(p is d for d in dense)] for group in groups]
            inside = {id(param) for group in chosen for param in group}
            return [group for group in chosen if group] + [[p] for p in self._params if id(p) not in inside]
        alone = [[param] for param in self._params if param in self._sparse]
        if not isinstance(groups, int) or groups == 0:
            return alone + [[param] for param in dense]
        return alone + [list(group) for group in pieces(dense, groups) if group]

    def _on_gradient(self, param: torch.Tensor) -> None:
        if id(param) in self._begun:
            raise RuntimeError(_TOO_OFTEN.format(name=self._names[id(param)], passes=self._passes))
        self._counts[id(param)] = self._counts.get(id(param), 0) + 1
        group = self._trained_with(param)
        if all(self._counts.get(id(member), 0) >= self._passes for member in group):
            self._begin(group)

    def _trained_with(self, param: torch.Tensor) -> list[torch.Tensor]:
        """Return the members of the group of ``param`` that are not frozen."""
        return [member for member in self._groups[id(param)] if member.requires_grad]

    def _begin(self, group: Sequence[torch.Tensor]) -> None:
        """Begin to reduce the gradients of ``group``; those that are missing count as zeros."""
        first = group[0]
        if len(group) == 1 and (first in self._sparse or (first.grad is not None and first.grad.is_sparse)):
            self._sparse.add(first)
            if not self._arguments.sparse_as_dense:
                self._begin_sparse(first)
                return
        was_sparse = {id(p) for p in group if p in self._sparse or (p.grad is not None and p.grad.is_sparse)}
        dense = [_dense_gradient(param) for param in group]
        pairs = [self._compression.compress(grad) for grad in dense]
        name = f"gradient.{self._names[id(first)]}"
        handle = grouped_allreduce_async_(
            [x for x, _ in pairs], name=name, op=self._arguments.op, process_set=self._arguments.process_set
        )

        def end() -> None:
            for param, x, (_, context) in zip(group, synchronize(handle), pairs, strict=True):
                grad = self._compression.decompress(x, context)
                param.grad = grad.to_sparse(1) if id(param) in was_sparse else grad.to(param.dtype)

        for param in group:
            self._begun[id(param)] = end if param is first else _nothing

    def _begin_sparse(self, param: torch.Tensor) -> None:
        if param.grad is None:
            param.grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64), param.new_empty(0, *param.shape[1:]), param.shape
            )
        name = f"gradient.{self._names[id(param)]}"
        op, process_set = self._arguments.op, self._arguments.process_set
        handle = sparse_allreduce_async(param.grad, name, op, process_set)

        def end() -> None:
            param.grad = handle()

        self._begun[id(param)] = end

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce what has not begun yet, then wait for all. Collective."""
        self._listen()
        try:
            for param in self._params:
                if id(param) not in self._begun and param.requires_grad:
                    self._begin(self._trained_with(param))
            for end in list(self._begun.values()):
                end()
        finally:
            self._begun.clear()
            self._counts.clear()

    def set_passes(self, passes: int) -> None:
        """Reduce after ``passes`` passes from now on."""
        self._passes = passes
        self._counts.clear()

    def detach(self) -> None:
        """Listen to gradients no more."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._begun.clear()


class DeltaAveraging:
    """Averaging by Adasum of what steps change: each rank steps with its own gradients, then changes are combined."""

    def __init__(self, optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
        compression = arguments.compression
        if isinstance(compression, methods.Compression | str):
            raise ValueError(f"compression is {compression!r}, which wants op=Average or Sum")
        refuse_wrapped(dict(arguments.named), None)
        self._arguments, self._compression = arguments, compression or Compression.none
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._params = [param for _, param in arguments.named if id(param) in own]
        self._before: list[torch.Tensor] = []
        _make_equal(optimizer, arguments)
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._note),
            optimizer.register_step_post_hook(self._combine),
        ]

    def synchronize(self) -> None:
        """Do nothing: gradients remain this rank's own."""

    def set_passes(self, passes: int) -> None:
        """Do nothing: gradients are added up until a step."""

    @torch.no_grad()
    def _note(self, *_: Any) -> None:
        self._before = [param.detach().clone() for param in self._params]

    @torch.no_grad()
    def _combine(self, *_: Any) -> None:
        changes = [param - before for param, before in zip(self._params, self._before, strict=True)]
        pairs = [self._compression.compress(change) for change in changes]
        handle = grouped_allreduce_async_([x for x, _ in pairs], name="adasum.changes", op=Adasum)
        combined = synchronize(handle)
        for param, before, x, pair in zip(self._params, self._before, combined, pairs, strict=True):
            param.copy_(before + self._compression.decompress(x, pair[1]))
        self._before = []

    def detach(self) -> None:
        """Combine no more."""
        for hook in self._hooks:
            hook.remove()


def _make_equal(optimizer: torch.optim.Optimizer, arguments: Arguments) -> None:
    """Copy the named parameters and the optimizer's state of the first rank to all. Collective."""
    group = members_of(arguments.process_set).group
    broadcast_parameters(dict(arguments.named), process_group=group)
    broadcast_optimizer_state(optimizer, process_group=group)


def _nothing() -> None:
    """Do nothing: the first parameter of the group does it for all."""


def _dense_gradient(param: torch.Tensor) -> torch.Tensor:
    if param.grad is None:
        return torch.zeros_like(param)
    return param.grad.to_dense() if param.grad.is_sparse else param.grad.detach()
