"""Objects that travel between ranks: numbers, text, tensors, and containers of them. Nothing is unpickled."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import torch

from pycomm.checkpoint import values

_SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type] = {"dict": dict, "ordered": OrderedDict}
_DEEPEST = 100
_LEVELS_OF_NODES = 4  # at most, of one level of a value
_KIND_OF = {kind: name for name, kind in (_SEQUENCES | _MAPPINGS).items()}


def to_tensors(value: Any, where: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``value`` as two tensors of bytes: a description, and what its tensors and arrays hold.

    Raises:
        TypeError, ValueError: there is something else in it; or it is nested too deeply, or contains itself.
    """
    tensors: list[torch.Tensor] = []
    try:
        node = _encode(value, tensors, where)
    except RecursionError:
        raise ValueError(f"{where} contains itself, or is nested too deeply: {_DEEPEST} levels can be sent") from None
    _require_shallow(node, where)
    for tensor in tensors:
        if tensor.is_cpu and tensor.numel() > 0 and tensor.data_ptr() == 0:
            raise ValueError(f"{where} has a tensor of shape {list(tensor.shape)} without memory: it was freed")
    forms = [[str(t.dtype).removeprefix("torch."), list(t.shape), str(t.device)] for t in tensors]
    text = json.dumps([node, forms]).encode()
    contents = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors if t.numel()]
    content = torch.cat(contents) if contents else torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), content


def from_tensors(text: torch.Tensor, content: torch.Tensor, where: str) -> Any:
    """Return the value that :func:`to_tensors` was given. Tensors of GPUs are on this process's GPU, or on the CPU."""
    node, forms = json.loads(text.numpy().tobytes())
    tensors, at = [], 0
    for name, shape, device in forms:
        dtype = values.dtype_called(name, where)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        made = content[at : at + num_bytes].clone().view(dtype).reshape(shape)
        tensors.append(made.cuda() if device.startswith("cuda") and torch.cuda.is_available() else made)
        at += num_bytes
    return _decode(node, tensors, where)


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
    except TypeError as error:
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, wanted numbers, text, bytes, tensors, "
            "arrays, and lists, tuples, sets and dicts of them: nothing that another rank has sent is unpickled; send "
            "what the object is made of, such as its state_dict()"
        ) from error


def _require_shallow(node: Any, where: str) -> None:
    """Raise ValueError if there are so many levels that other ranks, in calls of their own, may not come to the end."""
    level, depth = [node], 0
    while level := [part for each in level if isinstance(each, list) for part in each]:
        depth += 1
        if depth > _LEVELS_OF_NODES * _DEEPEST:
            raise ValueError(f"{where} is nested too deeply: {_DEEPEST} levels can be sent")


def _decode(node: list[Any], tensors: list[torch.Tensor], where: str) -> Any:
    kind, content = node[0], node[1]
    if kind == "complex":
        return complex(*content)
    if kind.startswith("s:"):
        return _SEQUENCES[kind[2:]](_decode(item, tensors, where) for item in content)
    if kind.startswith("m:"):
        pairs = ((_decode(key, tensors, where), _decode(item, tensors, where)) for key, item in content)
        return _MAPPINGS[kind[2:]](pairs)
    return values.decode(node, tensors, where)
