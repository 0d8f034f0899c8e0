"""Optimizer state as JSON and tensors, so that no rank has to unpickle data from another."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.torch_internals import dtensor_around, is_dtensor, local_of

Node = list[Any]
"""Encoded value: its kind, followed by the fields of that kind."""

_MISSING = object()
_NUMBERS_AND_TEXT = (bool, int, float, str, type(None))


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
        old: this rank's own value, from which objects that cannot be sent, and tensors of the same
            signature, are reused.
        owner: parameter whose state it is. New tensors are on its device, unless they were on the CPU (Adam's
            "step"), and a new DTensor is sharded as the parameter is.
        tensors: tensors that have yet to be filled are appended here, in the order of ``encode``.
        where: path of the value, for messages.

    Raises:
        ValueError: ``old`` lacks an object that cannot be sent, or a DTensor is the state of a plain parameter.
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
