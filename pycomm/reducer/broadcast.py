"""Broadcast of parameters, buffers and optimizer state, so that every rank starts from the same values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pycomm.communicator import Communicator
from pycomm.reducer.parts import part_of
from pycomm.reducer.plain_state import Node, decode, encode
from pycomm.torch_internals import is_dtensor, local_of

_CHUNK_BYTES = 32 << 20


def broadcast_parameters(
    model_or_state_dict: torch.nn.Module | Mapping[str, Any],
    src: int = 0,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Overwrite all parameters and buffers in place with those of rank ``src``. Collective.

    Args:
        model_or_state_dict: a module, or a mapping of names to tensors (other values are left alone).
        src: rank within ``process_group``.
        process_group: the default group if ``None``.

    Raises:
        TypeError: ``model_or_state_dict`` is neither a module nor a mapping.
        ValueError: names, shapes or dtypes differ between ranks (on every rank, naming the first
            difference), or ``src`` is not a rank of the group.
    """
    tensors = named_tensors(model_or_state_dict)
    with Communicator(process_group) as communicator:
        check_same_tensors(communicator, tensors)
        broadcast_tensors(communicator, tensors.values(), src)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, src: int = 0, *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Copy the optimizer state and hyperparameters of rank ``src`` to every rank. Collective.

    No step is taken, and tensors keep their dtypes (``load_state_dict`` would cast the fp32 state of an
    fp16 parameter to fp16). State that rank ``src`` does not have is dropped on the other ranks.

    Nothing is unpickled: each rank keeps its own functions and other objects that are not numbers,
    strings, tensors or containers of them.

    Args:
        optimizer: changed in place.
        src: rank within ``process_group``.
        process_group: the default group if ``None``.

    Raises:
        ValueError: the parameter groups differ in number or size, or a rank lacks an object that cannot
            be sent.
    """
    with Communicator(process_group) as communicator:
        broadcast_state(communicator, optimizer, src)


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


def check_same_tensors(communicator: Communicator, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError on every rank if a rank's tensors do not match rank 0's, naming the first difference."""
    lines = [f"{name}: {signature(t)}" for name, t in tensors.items()]
    check_same_lines(communicator, lines, "parameter or buffer")


def signature(tensor: torch.Tensor) -> str:
    """Return shape, dtype, kind of device and, of a DTensor, this rank's part as text for :func:`check_same_lines`."""
    where = "" if tensor.is_cpu else f" on {tensor.device.type}"
    part = f", a DTensor, part {part_of(tensor) or 'all'}" if is_dtensor(tensor) else ""
    return f"{list(tensor.shape)} {tensor.dtype}{where}{part}"


def check_same_lines(communicator: Communicator, lines: list[str], what: str) -> None:
    """Raise ValueError on every rank if a rank's lines differ from rank 0's, naming the first difference."""
    by_rank = [text.decode().split("\n") for text in communicator.channel.all_gather_bytes("\n".join(lines).encode())]
    first = by_rank[0]
    for rank, other in enumerate(by_rank):
        for i in range(max(len(other), len(first))):
            here = other[i] if i < len(other) else "nothing"
            there = first[i] if i < len(first) else "nothing"
            if here != there:
                raise ValueError(f"the ranks disagree: {what} {i} is {here!r} on rank {rank}, {there!r} on rank 0")


def broadcast_tensors(communicator: Communicator, tensors: Iterable[torch.Tensor], src: int) -> None:
    """Broadcast tensors in place, packed into few messages. Collective.

    Of DTensors, that is this rank's part. The kind of device must match: a tensor that is in CPU memory on one rank
    is so on every rank.
    """
    chunk: list[torch.Tensor] = []
    for tensor in map(local_of, tensors):
        if chunk and chunk[0].device != tensor.device:
            _broadcast_chunk(communicator, chunk, src)
            chunk = []
        chunk.append(tensor.detach())
        if sum(t.nbytes for t in chunk) >= _CHUNK_BYTES:
            _broadcast_chunk(communicator, chunk, src)
            chunk = []
    if chunk:
        _broadcast_chunk(communicator, chunk, src)


def _broadcast_chunk(communicator: Communicator, tensors: list[torch.Tensor], src: int) -> None:
    flat = torch.cat(
        [t.contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel() > 0]
        or [torch.empty(0, dtype=torch.uint8, device=tensors[0].device)]
    )
    communicator.broadcast(flat, src)
    if communicator.rank == src:
        return
    offset = 0
    for t in tensors:
        # Cloned, as a piece of flat may start at an address that is not aligned for its dtype.
        piece = flat[offset : offset + t.nbytes].clone()
        if t.numel() > 0:
            t.copy_(piece.view(t.dtype).view(t.shape))
        offset += t.nbytes


def broadcast_state(communicator: Communicator, optimizer: torch.optim.Optimizer, src: int) -> None:
    """Do the work of :func:`broadcast_optimizer_state`.

    An object that is not a number, string, tensor or container of them (a function among the
    hyperparameters, for example) is not sent: each rank must have its own, and keeps it.
    """
    sizes = [f"{len(group['params'])} parameters" for group in optimizer.param_groups]
    check_same_lines(communicator, sizes, "optimizer parameter group")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    mine = b""
    tensors: list[torch.Tensor] = []
    if communicator.rank == src:
        entries = [dict(optimizer.state.get(p, {})) for p in params]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        mine = json.dumps([encode(entry, tensors) for entry in [*entries, *groups]]).encode()
    nodes = json.loads(communicator.channel.all_gather_bytes(mine)[src])
    problem = ""
    if communicator.rank != src:
        try:
            tensors = restructure_state(optimizer, params, nodes)
        except ValueError as error:
            problem = str(error)
    for rank, text in enumerate(communicator.channel.all_gather_bytes(problem.encode())):
        if text:
            raise ValueError(f"the optimizer state of rank {src} does not fit rank {rank}: {text.decode()}")
    broadcast_tensors(communicator, tensors, src)


def restructure_state(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], nodes: list[Node]
) -> list[torch.Tensor]:
    """Give the state the structure that ``nodes`` describes; return the tensors that have yet to be filled."""
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
