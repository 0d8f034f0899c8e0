"""Broadcasts of parameters, optimizer state and objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pycomm.broadcasting import encode, restructure_state
from pycomm.errors import attempt
from pycomm.horovod.agreement import agreed
from pycomm.horovod.checks import check_root, check_tensor
from pycomm.horovod.differentiable import allgather
from pycomm.horovod.errors import InvalidRequestError
from pycomm.horovod.handles import synchronize_all
from pycomm.horovod.objects import from_tensors, to_tensors
from pycomm.horovod.operations import broadcast_, broadcast_async_
from pycomm.horovod.process_sets import ProcessSet, global_process_set, members_of
from pycomm.horovod.state import world
from pycomm.optim.parameters import checked_optimizer

_NOTHING = (torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors in place with those of ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, another mapping or list of names and tensors, or a
            list of tensors. What is no tensor is left alone.
        root_rank: a global rank.
        process_set: the ranks.

    Raises:
        TypeError: ``params`` is something else.
        InvalidRequestError: names, shapes or dtypes differ, or another rank cannot take part (on every rank).
    """

    def checked() -> list[tuple[str | None, torch.Tensor]]:
        check_root(root_rank, members_of(process_set))
        return _tensors_in(params)

    def lines(tensors: Sequence[tuple[str | None, torch.Tensor]]) -> list[str]:
        return [f"root_rank={root_rank}", *(f"{name}: {list(x.shape)} {x.dtype}" for name, x in tensors)]

    tensors = agreed(attempt(checked), "broadcast_parameters", process_set, lines)
    with torch.no_grad():
        handles = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in tensors]
    synchronize_all(handles)


def _tensors_in(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    found = [(name, tensor) for name, tensor in _named(params) if isinstance(tensor, torch.Tensor)]
    for name, tensor in found:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"params has the name {name!r}, wanted strings")
        check_tensor(tensor)
    return found


def _named(params: Any) -> list[tuple[str | None, Any]]:
    if isinstance(params, torch.nn.Module | torch.Tensor | str) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}, wanted model.state_dict(), model.named_parameters() or a list of "
            "tensors"
        )
    if isinstance(params, Mapping):
        return sorted(params.items())
    return [item if isinstance(item, tuple) else (None, item) for item in params]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy state and hyperparameters of the optimizer of ``root_rank`` to all ranks. No step is taken for it.

    Tensors keep their dtypes; state that ``root_rank`` does not have is dropped. Without any state yet, parameters
    without a gradient get one of zeros, on which scripts for Horovod may count. Objects that are not numbers, text,
    tensors or containers of them (functions, for instance) stay this rank's own.

    Args:
        optimizer: changed in place; wrapped by ``DistributedOptimizer`` or not.
        root_rank: a global rank.
        model: accepted, and not needed.

    Raises:
        TypeError: ``optimizer`` is none.
        ValueError: parameter groups differ in number or size (on every rank).
    """
    what, here = "broadcast_optimizer_state", world()
    optimizer = agreed(attempt(lambda: checked_optimizer(optimizer)), what, global_process_set)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    tensors: list[torch.Tensor] = []

    def encoded() -> Any:
        if here.rank != check_root(root_rank, here.sets[0]):
            return None
        entries = [dict(optimizer.state.get(p, {})) for p in params]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return [encode(entry, tensors) for entry in [*entries, *groups]]

    nodes = agreed(attempt(encoded), what, global_process_set, lambda _: [f"root_rank={root_rank}"])
    theirs, nodes = broadcast_object((sizes, nodes), root_rank, name="optimizer_state")
    problem = "" if theirs == sizes else f"its parameter groups have {sizes} parameters, those of {root_rank} {theirs}"
    if here.rank != root_rank and not problem:
        made = attempt(lambda: restructure_state(optimizer, params, nodes))
        problem, tensors = (str(made), []) if isinstance(made, Exception) else ("", made)
    for rank, text in enumerate(allgather_object(problem, name="optimizer_state.problem")):
        if text:
            raise ValueError(f"the optimizer state of rank {root_rank} does not fit rank {rank}: {text}")
    broadcast_parameters([(f"optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank)
    if not optimizer.state:  # as Horovod leaves an optimizer that has not stepped yet
        for param in params:
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the ``obj`` of ``root_rank``: that very object there, a copy elsewhere.

    Args:
        obj: numbers, text, bytes, tensors, numpy's arrays; lists, tuples, sets and dicts of them. Other ranks' counts
            for nothing.
        root_rank: a global rank.
        name: by which the ranks match the operation.
        process_set: the ranks.

    Raises:
        TypeError, ValueError: ``obj`` has something else in it, or itself; other ranks get an InvalidRequestError.
    """
    is_root = type(root_rank) is int and world().rank == root_rank
    packed = attempt(lambda: to_tensors(obj, "obj")) if is_root else _NOTHING
    text, content = _NOTHING if isinstance(packed, Exception) else packed
    sizes = torch.tensor([-1 if isinstance(packed, Exception) else text.numel(), content.numel()])
    broadcast_(sizes, root_rank, _part(name, "sizes"), process_set)
    if isinstance(packed, Exception):
        raise packed
    if sizes[0] < 0:
        raise InvalidRequestError(f"obj of rank {root_rank} cannot be sent; the error there says what is in it")
    both = torch.cat([text, content]) if is_root else torch.empty(int(sizes.sum()), dtype=torch.uint8)
    broadcast_(both, root_rank, _part(name, "content"), process_set)
    return obj if is_root else from_tensors(both[: int(sizes[0])], both[int(sizes[0]) :], "obj")


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the ``obj`` of all ranks, in rank order. What can be sent, and errors: as of :func:`broadcast_object`."""
    packed = attempt(lambda: to_tensors(obj, "obj"))
    text, content = _NOTHING if isinstance(packed, Exception) else packed
    mine = torch.tensor([[-1 if isinstance(packed, Exception) else text.numel(), content.numel()]])
    sizes = allgather(mine, _part(name, "sizes"), process_set).tolist()
    if isinstance(packed, Exception):
        raise packed
    for rank, (length, _) in enumerate(sizes):
        if length < 0:
            raise InvalidRequestError(
                f"obj of rank {rank} of the set cannot be sent; the error there says what is in it"
            )
    everything = allgather(torch.cat([text, content]), _part(name, "content"), process_set)
    parts = torch.split(everything, [length + rest for length, rest in sizes])
    return [from_tensors(part[:n], part[n:], "obj") for part, (n, _) in zip(parts, sizes, strict=True)]


def _part(name: Any, part: str) -> Any:
    return f"{name}.{part}" if isinstance(name, str) else name  # what is no name is an error of the operation
