"""Broadcast of parameters, buffers and optimizer state, so that every rank starts from the same values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from pycomm.agreement import Words, agreed, check_same_lines
from pycomm.collectives.communicator import Communicator
from pycomm.collectives.tensor_memory import Memory, digests_of, look_at, shared_parts
from pycomm.errors import attempt
from pycomm.optim.shards import part_of
from pycomm.torch_internals import dtensor_around, is_dtensor, local_of
from pycomm.untrusted import ANYTHING, ListOf, parse

Node = list[Any]
"""Encoded value: its kind, followed by the fields of that kind."""

_MISSING = object()
_NUMBERS_AND_TEXT = (bool, int, float, str, type(None))
_CHUNK_BYTES = 32 << 20

ORDER = "order of the optimizer's parameters: number"
"""Kind of the lines in :func:`names_in_order`."""

OWN = "what is each rank's own belongs in attach(..., tuning=pycomm.Tuning(ignore=[names or patterns]))"
"""Hint for messages about tensors that differ."""


def named_tensors(model_or_state_dict: torch.nn.Module | Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module, or the tensors of a mapping, by name."""
    if isinstance(model_or_state_dict, torch.nn.Module):
        model = model_or_state_dict
        return dict(model.named_parameters()) | dict(model.named_buffers())
    if isinstance(model_or_state_dict, Mapping):
        return {name: t for name, t in model_or_state_dict.items() if isinstance(t, torch.Tensor)}
    raise TypeError(
        f"model_or_state_dict is a {type(model_or_state_dict).__name__}, wanted a torch.nn.Module or a mapping"
    )


def share_tensors(communicator: Communicator, named: Mapping[str, torch.Tensor], src: int) -> None:
    """Send the tensors of rank ``src`` to all ranks, and compare those that cannot be sent. Collective.

    Raises:
        TypeError, ValueError: on every rank: a tensor has no shape yet; the ranks' tensors differ in names, order,
            shapes, dtypes or kinds; or tensors differ that cannot be sent. Names the first difference.
    """

    def lines(memories: dict[str, Memory]) -> dict[str, list[str]]:
        found = [line_of(name, x, memories[name], marks_frozen=False) for name, x in named.items()]
        return {"parameter or buffer": found}

    looked = attempt(lambda: {name: look_at(name, tensor) for name, tensor in named.items()})
    memories = agreed(communicator.channel.all_gather_bytes, looked, "take part", lines)
    differing = differing_memories(
        communicator, {name: m for name, m in memories.items() if m.parts and not m.writable}
    )
    if differing:
        raise ValueError(describe_difference(list(differing), next(iter(differing.values()))))
    broadcast_parts(communicator, [part for m in memories.values() if m.writable for part in m.parts], src)


def line_of(name: str, tensor: torch.Tensor, memory: Memory, marks_frozen: bool = True) -> str:
    """Return the properties of ``tensor`` that all ranks must share, for :func:`check_same_lines`."""
    is_frozen = marks_frozen and isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
    return f"{name}: {signature(tensor)}{', ' if memory.text else ''}{memory.text}{' frozen' if is_frozen else ''}"


def differing_memories(communicator: Communicator, memories: Mapping[str, Memory]) -> dict[str, int]:
    """Return the names whose memory differs between ranks, with the first such rank. Collective; same names on all."""
    everyones = communicator.channel.all_gather_bytes(b"".join(digests_of(memories.values())))
    found: dict[str, int] = {}
    for i, name in enumerate(memories):
        each = [theirs[8 * i : 8 * i + 8] for theirs in everyones]
        rank = next((rank for rank, value in enumerate(each) if value != each[0]), None)
        if rank is not None:
            found[name] = rank
    return found


def describe_difference(names: Sequence[str], rank: int) -> str:
    """Return the error text about tensors that differ on ``rank`` and cannot be overwritten."""
    more = f" ({len(names)} such tensors differ)" if len(names) > 1 else ""
    return (
        f"the contents of {names[0]!r} on rank {rank} differ from those on rank 0{more}, and cannot be overwritten, as "
        "it is not plain memory: load the same on every rank"
    )


def signature(tensor: torch.Tensor) -> str:
    """Return shape, dtype, kind of device and, of a DTensor, this rank's part, as text.

    Of trainable tensors also the memory order, in which gradients are sent, if it is not the usual one.
    """
    where = "" if tensor.is_cpu else f" on {tensor.device.type}"
    part = f", a DTensor, part {part_of(tensor) or 'all'}" if is_dtensor(tensor) else ""
    shape = "nested" if tensor.is_nested else list(tensor.shape)
    is_odd = tensor.requires_grad and tensor.layout is torch.strided and not tensor.is_contiguous()
    return f"{shape} {tensor.dtype}{where}{part}{f', strides {list(tensor.stride())}' if is_odd else ''}"


def broadcast_tensors(communicator: Communicator, tensors: Iterable[torch.Tensor], src: int) -> None:
    """Broadcast tensors in place, packed into few messages. Collective.

    Of DTensors, this rank's part; of expanded tensors, the memory behind them. Tensors without plain memory are left
    alone. Each tensor must be on the same kind of device on every rank.
    """
    broadcast_parts(communicator, shared_parts(tensors), src)


def broadcast_parts(
    communicator: Communicator, parts: Iterable[torch.Tensor], src: int, *, writes: bool = True
) -> None:
    """Broadcast :attr:`Memory.parts` in place, packed into few messages. Collective.

    ``writes``: whether this rank's parts are overwritten, if it is not rank ``src``.
    """
    chunk: list[torch.Tensor] = []
    num_bytes = 0
    for part in parts:
        if chunk and (chunk[0].device != part.device or num_bytes >= _CHUNK_BYTES):
            _broadcast_chunk(communicator, chunk, src, writes)
            chunk, num_bytes = [], 0
        chunk.append(part)
        num_bytes += part.nbytes
    if chunk:
        _broadcast_chunk(communicator, chunk, src, writes)


def _broadcast_chunk(communicator: Communicator, tensors: list[torch.Tensor], src: int, writes: bool) -> None:
    flat = torch.cat(
        [t.contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel() > 0]
        or [torch.empty(0, dtype=torch.uint8, device=tensors[0].device)]
    )
    communicator.broadcast(flat, src)
    if communicator.rank == src or not writes:
        return
    offset = 0
    for t in tensors:
        # Cloned, as a piece of flat may start at an address that is not aligned for its dtype.
        piece = flat[offset : offset + t.nbytes].clone()
        if t.numel() > 0:
            write(t, piece.view(t.dtype).view(t.shape))
        offset += t.nbytes


def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write ``value`` to ``tensor`` unless they are equal: autograd counts every write as a change."""
    if not tensor.is_cpu or not torch.equal(tensor, value):
        tensor.copy_(value)


def broadcast_state(
    communicator: Communicator,
    optimizer: torch.optim.Optimizer,
    src: int,
    *,
    leaves_out: Callable[[torch.Tensor], bool] = lambda _: False,
    check: Callable[[list[torch.Tensor], list[Node]], None] = lambda _, __: None,
    keeps_state: bool = False,
) -> None:
    """Copy the optimizer state and hyperparameters of rank ``src`` to every rank. Collective.

    No step is taken, and tensors keep their dtypes (``load_state_dict`` would cast the fp32 state of an fp16 parameter
    to fp16). Nothing is unpickled. An object that is not a number, string, tensor or container of them (a function
    among the hyperparameters, for example) is not sent: each rank must have its own, and keeps it.

    Args:
        leaves_out: returns whether a parameter, with its state, is this rank's own and not sent.
        check: called on the other ranks with the parameters and rank ``src``'s state for each; may raise ValueError.
        keeps_state: whether each rank keeps its state, and only hyperparameters are sent.
    """
    params = shared_parameters(optimizer, leaves_out)
    gather = communicator.channel.all_gather_bytes
    check_same_lines(gather, group_sizes(optimizer, leaves_out), "optimizer parameter group")
    params = [] if keeps_state else params
    mine = b""
    tensors: list[torch.Tensor] = []
    if communicator.rank == src:
        mine = json.dumps(state_nodes(optimizer, params, tensors)).encode()
    nodes = parse(gather(mine)[src], ListOf(ANYTHING), f"the optimizer state of rank {src}")

    def fill() -> list[torch.Tensor]:
        if communicator.rank == src:
            return tensors
        try:
            check(params, nodes)
            return restructure_state(optimizer, params, nodes)
        except ValueError as error:
            raise ValueError(
                f"the optimizer state of rank {src} does not fit rank {communicator.rank}: {error}"
            ) from None

    filled = agreed(gather, attempt(fill), words=Words(failed="{problem}"))
    broadcast_tensors(communicator, filled, src)


def shared_parameters(
    optimizer: torch.optim.Optimizer, leaves_out: Callable[[torch.Tensor], bool]
) -> list[torch.Tensor]:
    """Return the parameters of ``optimizer``, in the order of its groups, except this rank's own."""
    return [p for group in optimizer.param_groups for p in group["params"] if not leaves_out(p)]


def group_sizes(optimizer: torch.optim.Optimizer, leaves_out: Callable[[torch.Tensor], bool]) -> list[str]:
    """Return the size of each group of ``optimizer`` as a line to compare between ranks."""
    groups = optimizer.param_groups
    return [f"{sum(not leaves_out(p) for p in group['params'])} parameters" for group in groups]


def names_in_order(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, torch.Tensor],
    leaves_out: Callable[[torch.Tensor], bool] = lambda _: False,
) -> list[str]:
    """Return the names of the parameters of ``optimizer`` in its order, by which state is sent; "" for other ones."""
    by_id = {id(param): name for name, param in names.items()}
    return [by_id.get(id(param), "") for param in shared_parameters(optimizer, leaves_out)]


def state_nodes(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], tensors: list[torch.Tensor]
) -> list[Node]:
    """Return the state of ``params``, then all hyperparameters, encoded; tensors are appended to ``tensors``."""
    entries = [dict(optimizer.state.get(p, {})) for p in params]
    groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]
    return [encode(entry, tensors) for entry in [*entries, *groups]]


def check_state_keys(
    optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor], params: list[torch.Tensor], nodes: list[Node]
) -> None:
    """Raise ValueError if ``optimizer`` has state of ``params`` that the sending rank's ``nodes`` lack."""
    for i, param in enumerate(params):
        there = {key for key, _ in nodes[i][1]} if nodes[i][0] == "dict" else set()
        more = [key for key in optimizer.state.get(param, {}) if key not in there]
        if more:
            name = next((name for name, p in names.items() if p is param), str(i))
            raise ValueError(
                f"it has {more[0]!r} of parameter {name!r}, which would be lost: if the optimizer shares its state "
                'out among the ranks, write tuning=pycomm.Tuning(ignore=["optimizer state"]); if only some ranks have '
                "loaded a checkpoint, load it on all of them, or on rank 0"
            )


def restructure_state(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], nodes: list[Node]
) -> list[torch.Tensor]:
    """Give the state the structure described by ``nodes``; return the tensors to fill."""
    tensors: list[torch.Tensor] = []
    param_nodes, group_nodes = nodes[: len(params)], nodes[len(params) :]
    entries = [
        decode(node, optimizer.state.get(p, {}), p, tensors) for p, node in zip(params, param_nodes, strict=True)
    ]
    groups = [
        decode(node, group, torch.empty(0), tensors)
        for group, node in zip(optimizer.param_groups, group_nodes, strict=True)
    ]
    for p, entry in zip(params, entries, strict=True):  # nothing has been changed so far, in case decode raised
        if entry:
            optimizer.state[p] = entry
        else:
            optimizer.state.pop(p, None)
    for group, hyperparameters in zip(optimizer.param_groups, groups, strict=True):
        group.update(hyperparameters)
    return tensors


def encode(value: Any, tensors: list[torch.Tensor]) -> Node:
    """Return ``value`` encoded for JSON, with tensors replaced by their signatures and appended to ``tensors``."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
        tensors.append(value)
        return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch."), value.is_cpu]
    if is_dtensor(value):
        local = local_of(value)
        tensors.append(local)
        return ["part", list(local.shape), str(local.dtype).removeprefix("torch."), local.is_cpu]
    if isinstance(value, _NUMBERS_AND_TEXT):
        return ["value", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [encode(item, tensors) for item in value]]
    if isinstance(value, dict) and all(isinstance(key, _NUMBERS_AND_TEXT) for key in value):
        return ["dict", [[key, encode(item, tensors)] for key, item in value.items()]]
    return ["own", f"{type(value).__module__}.{type(value).__qualname__}"]


def decode(node: Node, old: Any, owner: torch.Tensor, tensors: list[torch.Tensor], where: str = "") -> Any:
    """Return the value that ``encode`` was given; tensors are not filled in yet.

    Args:
        node: result of ``encode``.
        old: this rank's own value. Its tensors of the same signature, and objects that cannot be sent, are reused.
        owner: parameter that the state belongs to. New tensors are on its device, unless they were on the CPU (Adam's
            "step"), and a new DTensor is sharded like the parameter.
        tensors: tensors to fill are appended here, in the order of ``encode``.
        where: path of the value, for errors.
    """
    kind, content = node[0], node[1]
    if kind == "tensor":
        tensors.append(_tensor_like(node, old, owner.device))
        return tensors[-1]
    if kind == "part":
        return _part_like(node, old, owner, tensors, where)
    if kind == "value":
        return content
    if kind == "own":
        if old is _MISSING:
            raise ValueError(f"{where or 'it'} is a {content}, which cannot be sent: load the checkpoint on every rank")
        return old
    if kind == "dict":
        entries = old if isinstance(old, dict) else {}
        return {
            key: decode(item, entries.get(key, _MISSING), owner, tensors, f"{where}[{key!r}]") for key, item in content
        }
    known = old if isinstance(old, (list, tuple)) else ()
    items = [
        decode(item, known[i] if i < len(known) else _MISSING, owner, tensors, f"{where}[{i}]")
        for i, item in enumerate(content)
    ]
    return tuple(items) if kind == "tuple" else items


def _part_like(node: Node, old: Any, owner: torch.Tensor, tensors: list[torch.Tensor], where: str) -> torch.Tensor:
    if not is_dtensor(owner):
        raise ValueError(f"{where or 'it'} is a DTensor, and its parameter is not")
    local = _tensor_like(node, local_of(old) if is_dtensor(old) else None, owner.device)
    tensors.append(local)
    if is_dtensor(old) and local is local_of(old):
        return old
    return dtensor_around(local, owner)


def _tensor_like(node: Node, old: Any, device: torch.device) -> torch.Tensor:
    _, shape, name, on_cpu = node
    dtype: torch.dtype = getattr(torch, name)
    if type(old) in (torch.Tensor, torch.nn.Parameter):
        if (list(old.shape), old.dtype, old.is_cpu) == (shape, dtype, on_cpu):
            return old  # type: ignore[no-any-return]
        device = device if device.type != "cpu" else old.device
    return torch.empty(shape, dtype=dtype, device=torch.device("cpu") if on_cpu else device)
