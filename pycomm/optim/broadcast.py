"""Making every rank start from the same numbers."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from pycomm.communicator import Communicator

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

    Raises:
        ValueError: the parameter groups differ in number or size.
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
    lines = [f"{name}: {looks(t)}" for name, t in tensors.items()]
    check_same_lines(communicator, lines, "parameter or buffer")


def looks(tensor: torch.Tensor) -> str:
    """What must be equal on all ranks, for :func:`check_same_lines`."""
    where = "" if tensor.is_cpu else f" on {tensor.device.type}"
    return f"{list(tensor.shape)} {tensor.dtype}{where}"


def check_same_lines(communicator: Communicator, lines: list[str], what: str) -> None:
    """ValueError, on every rank, naming the first line in which a rank differs from rank 0."""
    everyone = [text.decode().split("\n") for text in communicator.all_gather_bytes("\n".join(lines).encode())]
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
    sizes = [f"{len(group['params'])} parameters" for group in optimizer.param_groups]
    check_same_lines(communicator, sizes, "optimizer parameter group")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    mine = b""
    if communicator.rank == src:
        # Tensors travel apart; here stands only what they look like.
        state = [_skeleton(optimizer.state.get(p, {})) for p in params]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        buffer = io.BytesIO()
        torch.save({"state": state, "groups": groups}, buffer)
        mine = buffer.getvalue()
    theirs = torch.load(io.BytesIO(communicator.all_gather_bytes(mine)[src]), map_location="cpu", weights_only=False)
    tensors: list[torch.Tensor] = []
    for p, skeleton in zip(params, theirs["state"], strict=True):
        if communicator.rank == src:
            entry = optimizer.state.get(p, {})
        else:
            entry = _flesh_out(skeleton, optimizer.state.get(p, {}), p.device)
            if entry:
                optimizer.state[p] = entry
            else:
                optimizer.state.pop(p, None)
        tensors += [entry[key] for key, value in skeleton.items() if isinstance(value, _Shape)]
    broadcast_tensors(communicator, tensors, src)
    if communicator.rank != src:
        for group, hyperparameters in zip(optimizer.param_groups, theirs["groups"], strict=True):
            group.update({key: _like(value, group.get(key)) for key, value in hyperparameters.items()})


def _like(value: Any, old: Any) -> Any:
    """A tensor among the hyperparameters (the learning rate of a capturable optimizer) stays where it was."""
    both = isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)
    return value.to(old.device) if both else value


class _Shape:
    """Stands for a tensor in a skeleton."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.on_cpu = tensor.shape, tensor.dtype, tensor.is_cpu

    def empty(self, old: Any, device: torch.device) -> torch.Tensor:
        """``old`` if it fits; else a new one, on the CPU if the other rank's is (Adam's "step"), or on ``device``."""
        wanted = torch.device("cpu") if self.on_cpu else device
        if isinstance(old, torch.Tensor) and (old.shape, old.dtype, old.device) == (self.shape, self.dtype, wanted):
            return old
        return torch.empty(self.shape, dtype=self.dtype, device=wanted)


def _skeleton(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _Shape(v) if isinstance(v, torch.Tensor) else v for key, v in entry.items()}


def _flesh_out(skeleton: Mapping[str, Any], old: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: v.empty(old.get(key), device) if isinstance(v, _Shape) else v for key, v in skeleton.items()}
