"""Encoding of values as JSON and tensors, so that reading a file requires no pickle."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from pycomm.checks import shown
from pycomm.training.checkpoint.files import DamagedError
from pycomm.untrusted import ANYTHING, COUNT, ListOf, OneOf, PairOf, require

Node = list[Any]
"""Encoded value: its kind, followed by the fields of that kind."""

_MISSING = object()
_NUMBERS_AND_TEXT = (bool, int, float, str, type(None))
_SCALAR = OneOf(None, bool, int, float, str)
_FIELDS: dict[str, tuple[Any, ...]] = {
    "tensor": (COUNT,),
    "array": (COUNT, str, ListOf(COUNT)),
    "value": (_SCALAR,),
    "bytes": (str,),
    "dtype": (str,),
    "own": (str,),
    **dict.fromkeys(("list", "tuple"), (ListOf(ANYTHING),)),
    **dict.fromkeys(("dict", "counter"), (ListOf(PairOf(_SCALAR, ANYTHING)),)),
}
"""Fields of each kind of node."""

_ARRAY_DTYPE = re.compile(r"[<>|=][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,7}\])?")
_LARGEST_KEY = 2**63  # crafted integers beyond collide as keys of a dict
_MOST_LARGE_KEYS = 1000


def encode(value: Any, tensors: list[torch.Tensor], where: str, *, lenient: bool = False) -> Node:
    """Return ``value`` encoded for JSON, with tensors appended to ``tensors`` and replaced by their positions there.

    Args:
        value: numbers, strings, bytes, dtypes, tensors, numpy's arrays and scalars; lists, tuples and dicts of them.
        tensors: appended to, not copied.
        lenient: record only the type of any other object; :func:`decode` then requires one to keep.
    """
    if isinstance(value, torch.Tensor):
        return ["tensor", _position(_plain_tensor(value, where), tensors)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        flat = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
        return ["array", _position(flat, tensors), value.dtype.str, list(value.shape)]
    if isinstance(value, _NUMBERS_AND_TEXT):
        return ["value", value]
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) in (list, tuple, torch.Size):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [encode(item, tensors, f"{where}[{i}]", lenient=lenient) for i, item in enumerate(value)]]
    if isinstance(value, dict) and all(isinstance(key, _NUMBERS_AND_TEXT) for key in value):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return [kind, [[k, encode(item, tensors, f"{where}[{k!r}]", lenient=lenient)] for k, item in value.items()]]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if lenient:
        return ["own", name]
    raise TypeError(
        f"{where} is a {name}, wanted an object with state_dict() and load_state_dict(), or numbers, strings, bytes, "
        "tensors, arrays, and lists, tuples and dicts of them"
    )


def decode(node: Node, tensors: Sequence[torch.Tensor], where: str, old: Any = _MISSING) -> Any:
    """Return the value that :func:`encode` encoded.

    Args:
        old: this process's present value, which supplies objects that cannot be saved.
    """
    kind, content = node[0], node[1]
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return _array(tensors[content], node, where)
    if kind == "value":
        return content
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "dtype":
        return dtype_called(content, where)
    if kind in ("list", "tuple"):
        known = old if isinstance(old, list | tuple) else ()
        items = [
            decode(item, tensors, f"{where}[{i}]", known[i] if i < len(known) else _MISSING)
            for i, item in enumerate(content)
        ]
        return items if kind == "list" else tuple(items)
    if kind in ("dict", "counter"):
        entries = old if isinstance(old, dict) else {}
        pairs = {key: decode(item, tensors, f"{where}[{key!r}]", entries.get(key, _MISSING)) for key, item in content}
        return pairs if kind == "dict" else Counter(pairs)
    if old is _MISSING:
        raise ValueError(f"{where} was a {content}, which is not saved, and there is none here to keep")
    return old


def without_foreign(node: Node) -> Node:
    """Return ``node`` without the entries of dicts whose value was an object that cannot be saved."""
    kind = node[0]
    if kind in ("list", "tuple"):
        return [kind, [without_foreign(item) for item in node[1]]]
    if kind in ("dict", "counter"):
        return [kind, [[key, without_foreign(item)] for key, item in node[1] if item[0] != "own"]]
    return node


def dtype_called(name: str, where: str) -> torch.dtype:
    """Return torch's dtype of that name. Raise ValueError if there is none."""
    found = vars(torch).get(name)  # getattr() could import submodules
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{where} has dtype {name!r}, which torch does not have")
    return found


def _array(content: torch.Tensor, node: Node, where: str) -> np.ndarray[Any, Any]:
    name, shape = node[2], node[3]
    if not _ARRAY_DTYPE.fullmatch(name):  # an object dtype would read pointers from the file
        raise DamagedError(f"{where} has dtype {name!r}, wanted one of numbers")
    try:
        flat: np.ndarray[Any, Any] = content.numpy()
        return flat.view(np.dtype(name)).reshape(shape)
    except (ValueError, TypeError) as error:
        raise DamagedError(f"{where} is no array of shape {shape} and dtype {name!r}: {error}") from None


def check_node(node: Any, where: str) -> None:
    """Raise DamagedError unless :func:`encode` may have returned ``node``."""
    positions: list[int] = []
    try:
        _check_node(node, positions)
    except RecursionError:
        raise DamagedError(f"{where} is nested too deeply to be read") from None
    except ValueError as error:
        raise DamagedError(f"{where} is malformed: {error}") from None
    if sorted(positions) != list(range(len(positions))):
        raise DamagedError(f"{where} is malformed: its tensors are not numbered")


def _check_node(node: Any, positions: list[int]) -> None:
    kind = node[0] if isinstance(node, list) and node and isinstance(node[0], str) else ""
    if kind == "value" and len(node) == 2 and isinstance(node[1], _NUMBERS_AND_TEXT):
        return  # the most frequent case
    shapes = _FIELDS.get(kind)
    if shapes is None or len(node) != 1 + len(shapes):
        raise ValueError(f"{shown(node)} is no value")
    for field, shape in zip(node[1:], shapes, strict=True):
        require(field, shape, kind)
    content = node[1]
    if kind in ("tensor", "array"):
        positions.append(content)
    elif kind == "bytes":
        base64.b64decode(content, validate=True)
    entries = _entries_of(node)
    if sum(isinstance(key, int) and abs(key) >= _LARGEST_KEY for key, _ in entries) > _MOST_LARGE_KEYS:
        raise ValueError(f"it has more than {_MOST_LARGE_KEYS} keys beyond 64 bits")
    for _, item in entries:
        _check_node(item, positions)


def _entries_of(node: Node) -> list[tuple[Any, Node]]:
    """Return the keys of a container with their nodes; of anything else none."""
    if node[0] in ("list", "tuple"):
        return list(enumerate(node[1]))
    return node[1] if node[0] in ("dict", "counter") else []


def positions_in(node: Node) -> list[int]:
    """Return the positions of all tensors of ``node``."""
    if node[0] in ("tensor", "array"):
        return [node[1]]
    return [position for _, item in _entries_of(node) for position in positions_in(item)]


def lines_of(node: Node, tensors: Sequence[torch.Tensor], where: str) -> Iterator[str]:
    """Yield one line of text for each value in ``node``, with everything but the contents of tensors."""
    kind, content = node[0], node[1]
    if kind in ("list", "tuple", "dict", "counter"):
        yield f"{where}: {len(content)} values"
        for key, item in _entries_of(node):
            yield from lines_of(item, tensors, f"{where}[{key!r}]")
    elif kind in ("tensor", "array"):
        yield f"{where}: {list(tensors[content].shape)} {tensors[content].dtype} {node[2:]}"
    else:
        yield f"{where}: {json.dumps(content)}"


def _position(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> int:
    tensors.append(tensor)
    return len(tensors) - 1


def _plain_tensor(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Return ``tensor`` detached; raise TypeError unless it is dense and entirely on this rank."""
    kind = type(tensor).__name__
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(f"{where} is a {kind} with layout {tensor.layout}, wanted a dense tensor")
    if tensor.is_meta:
        raise TypeError(f"{where} is on device meta: it has no values")
    return tensor.detach()
