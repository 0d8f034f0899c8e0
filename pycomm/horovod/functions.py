"""Broadcasts of parameters, optimizer state and objects."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from pycomm import agreement
from pycomm.collectives.broadcasting import encode, restructure_state
from pycomm.errors import attempt
from pycomm.horovod.collectives import AllGather, check_root, check_tensor, synchronize_all
from pycomm.horovod.names import InvalidRequestError
from pycomm.horovod.operations import allgather, broadcast_, broadcast_async_
from pycomm.horovod.process_sets import ProcessSet, global_process_set, members_of, world
from pycomm.optim.parameters import checked_optimizer
from pycomm.training.checkpoint import values
from pycomm.untrusted import ANYTHING, ListOf, PairOf, parse

T = TypeVar("T")

_WORDS = agreement.Words(
    failed="{what}: rank {rank} of the set cannot take part: {problem}",
    differ="{what}: the ranks disagree: {here!r} on rank {rank} of the set, {there!r} on rank 0 of it",
    error=InvalidRequestError,
    shares_lost=True,
)

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict}
_DEEPEST = 100
_LEVELS_OF_NODES = 4  # at most, of one level of a value
_FORM = ListOf(ANYTHING, 3)
_KIND_OF = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}


def agreed(
    outcome: T | Exception, what: str, process_set: ProcessSet, lines: Callable[[T], Sequence[str]] = lambda _: ()
) -> T:
    """Return this rank's outcome if every rank of ``process_set`` succeeded, with the same ``lines``. Collective.

    Args:
        outcome: the result of this rank, or its error.
        what: name of the call.
        process_set: the ranks.
        lines: description of the result, which must be the same on all ranks.

    Raises:
        InvalidRequestError: on every rank: another rank had an error, or another description, of which the first line
            that differs is named. This rank's own error is raised as it is.
    """

    def gather(mine: bytes) -> list[bytes]:
        call = AllGather(f"agreement on {what}", process_set)
        (texts,) = call.run([torch.frombuffer(bytearray(mine), dtype=torch.uint8)])
        return [part.numpy().tobytes() for part in torch.split(texts, call.parts[0])]

    return agreement.agreed(gather, outcome, what, lambda made: {"": list(lines(made))}, _WORDS)


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors in place with the tensors of ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, another mapping or list of names and tensors, or a
            list of tensors. Other values are left alone.
        root_rank: a global rank.
        process_set: the ranks.

    Raises:
        TypeError: ``params`` has another type.
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
    """Copy state and hyperparameters of the optimizer of ``root_rank`` to all ranks, without taking a step.

    Tensors keep their dtypes; state that ``root_rank`` does not have is dropped. If there is no state yet, parameters
    without a gradient get one of zeros, as Horovod's scripts may expect. Objects that are not numbers, text, tensors or
    containers of them (functions, for instance) remain this rank's own.

    Args:
        optimizer: changed in place; wrapped by ``DistributedOptimizer`` or not.
        root_rank: a global rank.
        model: accepted, and not needed.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
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
    problem = "" if theirs == sizes else f"its parameter groups have {sizes} parameters, rank {root_rank}'s {theirs}"
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
        obj: numbers, text, bytes, tensors, numpy's arrays; lists, tuples, sets and dicts of them. Ignored on other
            ranks.
        root_rank: a global rank.
        name: name by which the ranks match the operation.
        process_set: the ranks.

    Raises:
        TypeError, ValueError: ``obj`` contains another type, or itself; other ranks get an InvalidRequestError.
    """
    is_root = type(root_rank) is int and world().rank == root_rank
    length, data, error = _packed(obj) if is_root else (0, torch.empty(0, dtype=torch.uint8), None)
    sizes = torch.tensor([length, data.numel()])
    broadcast_(sizes, root_rank, _part(name, "sizes"), process_set)
    if error is not None:
        raise error
    if sizes[0] < 0:
        raise InvalidRequestError(f"obj of rank {root_rank} cannot be sent; the error there says what is in it")
    if not is_root:
        data = torch.empty(int(sizes[1]), dtype=torch.uint8)
    broadcast_(data, root_rank, _part(name, "content"), process_set)
    return obj if is_root else _unpacked(data, int(sizes[0]))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return all ranks' ``obj``, in rank order. Types and errors are as for :func:`broadcast_object`."""
    own_length, data, error = _packed(obj)
    sizes = allgather(torch.tensor([[own_length, data.numel()]]), _part(name, "sizes"), process_set).tolist()
    if error is not None:
        raise error
    for rank, (length, _) in enumerate(sizes):
        if length < 0:
            raise InvalidRequestError(
                f"obj of rank {rank} of the set cannot be sent; the error there says what is in it"
            )
    everything = allgather(data, _part(name, "content"), process_set)
    parts = torch.split(everything, [whole for _, whole in sizes])
    return [_unpacked(part, length) for part, (length, _) in zip(parts, sizes, strict=True)]


def _part(name: Any, part: str) -> Any:
    return f"{name}.{part}" if isinstance(name, str) else name  # what is no name is an error of the operation


# Objects as tensors. Nothing is unpickled.


def _packed(obj: Any) -> tuple[int, torch.Tensor, Exception | None]:
    """Return ``obj`` as bytes, its description and then the contents of its tensors, with the description's length.

    If it cannot be sent: the length -1, no bytes and the error.
    """
    data = attempt(lambda: _to_bytes(obj))
    return (-1, torch.empty(0, dtype=torch.uint8), data) if isinstance(data, Exception) else (*data, None)


def _to_bytes(obj: Any) -> tuple[int, torch.Tensor]:
    tensors: list[torch.Tensor] = []
    try:
        node = _encode(obj, tensors, "obj")
    except RecursionError:
        raise ValueError(f"obj contains itself, or is nested too deeply: {_DEEPEST} levels can be sent") from None
    _require_shallow(node)
    for tensor in tensors:
        if tensor.is_cpu and tensor.numel() > 0 and tensor.data_ptr() == 0:
            raise ValueError(f"obj has a tensor of shape {list(tensor.shape)} without memory: it was freed")
    forms = [[str(t.dtype).removeprefix("torch."), list(t.shape), str(t.device)] for t in tensors]
    text = json.dumps([node, forms]).encode()
    contents = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    return len(text), torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), *contents])


def _unpacked(data: torch.Tensor, length: int) -> Any:
    """Return the object passed to :func:`_packed`. Tensors of GPUs are on this process's GPU, or on the CPU."""
    node, forms = parse(data[:length].numpy().tobytes(), PairOf(ListOf(ANYTHING), ListOf(_FORM)), "the object")
    tensors, at = [], length
    for name, shape, device in forms:
        dtype = values.dtype_called(name, "obj")
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        made = data[at : at + num_bytes].clone().view(dtype).reshape(shape)
        tensors.append(made.cuda() if device.startswith("cuda") and torch.cuda.is_available() else made)
        at += num_bytes
    return _decode(node, tensors)


def _encode(value: Any, tensors: list[torch.Tensor], where: str) -> list[Any]:
    kind = _KIND_OF.get(type(value))
    if kind in _SEQUENCES:
        items = list(value)
        return [f"s:{kind}", [_encode(item, tensors, f"{where}[{i}]") for i, item in enumerate(items)]]
    if kind in _MAPPINGS:
        pairs = [
            [_encode(key, tensors, f"a key of {where}"), _encode(item, tensors, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return [f"m:{kind}", pairs]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    try:
        return values.encode(value, tensors, where)
    except TypeError:
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, wanted numbers, text, bytes, tensors, "
            "arrays, and lists, tuples, sets and dicts of them: nothing that another rank has sent is unpickled; send "
            "what the object is made of, such as its state_dict()"
        ) from None


def _require_shallow(node: Any) -> None:
    """Raise ValueError if ``node`` has so many levels that another rank might exceed its recursion limit."""
    level, depth = [node], 0
    while level := [part for each in level if isinstance(each, list) for part in each]:
        depth += 1
        if depth > _LEVELS_OF_NODES * _DEEPEST:
            raise ValueError(f"obj is nested too deeply: {_DEEPEST} levels can be sent")


def _decode(node: list[Any], tensors: list[torch.Tensor]) -> Any:
    kind, content = node[0], node[1]
    if kind == "complex":
        return complex(*content)
    if kind.startswith("s:"):
        return _SEQUENCES[kind[2:]](_decode(item, tensors) for item in content)
    if kind.startswith("m:"):
        pairs = ((_decode(key, tensors), _decode(item, tensors)) for key, item in content)
        return _MAPPINGS[kind[2:]](pairs)
    return values.decode(node, tensors, "obj")
