"""Making every rank start from the same numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pycomm.communicator import Communicator
from pycomm.reducer.plain_state import Node, decode, encode

_CHUNK_BYTES = 32 << 20


def broadcast_parameters(
    model_or_state_dict: torch.nn.Module | Mapping[str, Any],
    src: int = 0,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Overwrite all parameters and buffers, in place, by those of rank ``src``. Collective.

    Args:
        model_or_state_dict: a module, or a mapping of names to tensors (other values are left).
        src: rank within ``process_group``.

    Raises:
        ValueError: names, shapes or dtypes differ between ranks (on every rank, naming the first
            difference), or ``src`` is no rank.
    """
    tensors = named_tensors(model_or_state_dict)
    with Communicator(process_group) as communicator:
        check_same_tensors(communicator, tensors)
        broadcast_tensors(communicator, tensors.values(), src)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, src: int = 0, *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Give every rank the optimizer state and hyperparameters of rank ``src``. Collective.

    No step is taken, and tensors keep their dtypes (``load_state_dict`` would cast fp32 state of an
    fp16 parameter to fp16). State that only other ranks have is dropped.

    Nothing is unpickled: functions and other objects that are no numbers, texts or tensors stay as each
    rank has them.

    Raises:
        ValueError: the parameter groups differ in number or size, or a rank lacks such an object.
    """
    with Communicator(process_group) as communicator:
        broadcast_state(communicator, optimizer, src)


def named_tensors(model_or_state_dict: torch.nn.Module | Mapping[str, Any]) -> dict[str, torch.Tensor]:
    if isinstance(model_or_state_dict, torch.nn.Module):
        model = model_or_state_dict
        return dict(model.named_parameters()) | dict(model.named_buffers())
    if isinstance(model_or_state_dict, Mapping):
        return {name: t for name, t in model_or_state_dict.items() if isinstance(t, torch.Tensor)}
    raise TypeError(
        f"model_or_state_dict is a {type(model_or_state_dict).__name__}, wanted a torch.nn.Module or a mapping"
    )


def check_same_tensors(communicator: Communicator, tensors: Mapping[str, torch.Tensor]) -> None:
    """ValueError, on every rank, naming the first place where a rank's list differs from rank 0's."""
    lines = [f"{name}: {signature(t)}" for name, t in tensors.items()]
    check_same_lines(communicator, lines, "parameter or buffer")


def signature(tensor: torch.Tensor) -> str:
    """What must be equal on all ranks, for :func:`check_same_lines`."""
    where = "" if tensor.is_cpu else f" on {tensor.device.type}"
    return f"{list(tensor.shape)} {tensor.dtype}{where}"


def check_same_lines(communicator: Communicator, lines: list[str], what: str) -> None:
    """ValueError, on every rank, naming the first line in which a rank differs from rank 0."""
    everyone = [text.decode().split("\n") for text in communicator.channel.all_gather_bytes("\n".join(lines).encode())]
    for rank, theirs in enumerate(everyone):
        for i in range(max(len(theirs), len(everyone[0]))):
            here = theirs[i] if i < len(theirs) else "nothing"
            there = everyone[0][i] if i < len(everyone[0]) else "nothing"
            if here != there:
                raise ValueError(f"the ranks disagree: {what} {i} is {here!r} on rank {rank}, {there!r} on rank 0")


def broadcast_tensors(communicator: Communicator, tensors: Iterable[torch.Tensor], src: int) -> None:
    """In place, packed into few messages. On every rank the same ones lie in CPU memory, the others on its GPU."""
    chunk: list[torch.Tensor] = []
    for tensor in tensors:
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
        # A copy: a piece of flat may lie at an address unfit for its dtype.
        piece = flat[offset : offset + t.nbytes].clone()
        if t.numel() > 0:
            t.copy_(piece.view(t.dtype).view(t.shape))
        offset += t.nbytes


def broadcast_state(communicator: Communicator, optimizer: torch.optim.Optimizer, src: int) -> None:
    """See :func:`broadcast_optimizer_state`.

    What is neither number, text, tensor nor a container of them stays as it is on each rank, which must
    have it: a function among the hyperparameters, say.
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
            tensors = _take_state(optimizer, params, nodes)
        except ValueError as error:
            problem = str(error)
    for rank, text in enumerate(communicator.channel.all_gather_bytes(problem.encode())):
        if text:
            raise ValueError(f"the optimizer state of rank {src} does not fit rank {rank}: {text.decode()}")
    broadcast_tensors(communicator, tensors, src)


def _take_state(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], nodes: list[Node]) -> list[torch.Tensor]:
    """Make the state look like ``nodes``; returns the tensors that are still to be filled in."""
    tensors: list[torch.Tensor] = []
    of_params, of_groups = nodes[: len(params)], nodes[len(params) :]
    entries = [
        decode(node, optimizer.state.get(p, {}), p.device, tensors) for p, node in zip(params, of_params, strict=True)
    ]
    groups = [
        decode(node, group, torch.device("cpu"), tensors)
        for group, node in zip(optimizer.param_groups, of_groups, strict=True)
    ]
    for p, entry in zip(params, entries, strict=True):  # nothing has been changed where something did not fit
        if entry:
            optimizer.state[p] = entry
        else:
            optimizer.state.pop(p, None)
    for group, hyperparameters in zip(optimizer.param_groups, groups, strict=True):
        group.update(hyperparameters)
    return tensors
