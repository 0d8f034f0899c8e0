"""Arguments of DistributedOptimizer, checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pycomm.horovod.process_sets import ProcessSet
from pycomm.horovod.reduce_ops import ReduceOp

Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Arguments:
    """Arguments of ``DistributedOptimizer``.

    Attributes:
        named: the optimizer's parameters, and maybe others, by name.
        compression: Horovod's or pycomm's.
        passes: backward passes per step.
        op: the reduction.
        groups: parameters that are reduced together.
        sparse_as_dense: whether sparse gradients are made dense on their way.
        process_set: the ranks.
        sparse: those of ``named`` whose gradients are sparse.
        loss_scaler: that the loss is scaled by.
    """

    named: Named
    compression: Any
    passes: int
    op: ReduceOp
    groups: int | Sequence[Sequence[torch.Tensor]] | None
    sparse_as_dense: bool
    process_set: ProcessSet
    sparse: Collection[torch.Tensor] = ()
    loss_scaler: Any = None


def named_parameters_of(optimizer: torch.optim.Optimizer, given: Iterable[Any] | None) -> Named:
    """Return the names that are ``given``, or numbers made up by the position in the optimizer's groups.

    Raises:
        TypeError, ValueError: they are no names of parameters, two are equal, or a parameter has none.
    """
    own = [
        (f"allreduce.noname.{i}.{j}", param)
        for i, group in enumerate(optimizer.param_groups)
        for j, param in enumerate(group["params"])
    ]
    if given is None:
        return own
    if isinstance(given, torch.nn.Module):
        raise TypeError(f"named_parameters is a {type(given).__name__}, wanted model.named_parameters()")
    named = list(given)
    for item in named:
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
            raise ValueError(f"named_parameters has a {type(item).__name__}, wanted pairs: model.named_parameters()")
    twice = [name for name, times in Counter(name for name, _ in named).items() if times > 1]
    if twice:
        raise ValueError(f"named_parameters has the name {twice[0]!r} more than once: put the model's name in front")
    known = {id(param) for _, param in named}
    for position, param in own:
        if id(param) not in known:
            where = position.removeprefix("allreduce.noname.")
            raise ValueError(f"named_parameters leaves out the optimizer's parameter {where} (group.position)")
    return named


def require_groups(groups: Any) -> None:
    """Raise TypeError or ValueError unless ``groups`` is a number, or a list of lists of tensors, or ``None``."""
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 0:
            raise ValueError(f"groups is {groups}, wanted a number that is not negative")
        return
    if not isinstance(groups, list):
        raise TypeError(f"groups is a {type(groups).__name__}, wanted a number or a list of lists of tensors")
    seen: set[int] = set()
    for group in groups:
        for param in group:
            if not isinstance(param, torch.Tensor):
                raise ValueError(f"groups has a {type(param).__name__}, wanted lists of tensors")
            if id(param) in seen:
                raise ValueError("groups has a parameter twice")
            seen.add(id(param))
