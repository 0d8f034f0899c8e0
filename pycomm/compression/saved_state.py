"""Compression state in checkpoints: saved per rank, and redistributed if the number of ranks has changed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycomm.checks import shown
from pycomm.collectives.communicator import Communicator
from pycomm.compression.base import Compression, State
from pycomm.torch_internals import renamed

_LABEL = re.compile(r"(?P<name>.+)\[(?P<part>\d+:\d+/\d+(,\d+:\d+/\d+)*)\]")
_FORMAT = 3
_KEYS = {"format", "method", "world_size", "steps", "ranks"}
_SUMMED = torch.float16, torch.bfloat16, torch.float32, torch.float64
CONTRIBUTIONS = ("residual", "velocity", "late")
"""Keys of state whose sum over the ranks counts; all other state is equal on all ranks."""


def gather_state(
    current: State, method: Compression, communicator: Communicator, steps: int, labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Do the work of ``Reducer.state_dict``.

    State that differs between the ranks is stored under the rank's number, because
    torch.distributed.checkpoint saves only one of several entries that have the same name.

    Args:
        labels: key of each parameter's state, by name: parts of a DTensor on different ranks have different keys.
            The names themselves if ``None``.
    """
    labels = {name: name for name in current} if labels is None else labels
    state = {
        labels[name]: {key: torch.empty(t.shape, dtype=t.dtype).copy_(t) for key, t in entry.items()}
        for name, entry in current.items()
    }
    return {
        "format": _FORMAT,
        "method": type(method).__name__,
        "world_size": communicator.size,
        "steps": steps,
        "ranks": {str(communicator.rank): state},
    }


def select_state(
    state: dict[str, Any] | list[dict[str, Any]],
    current: State,
    method: Compression,
    communicator: Communicator,
    strict: bool,
    labels: Mapping[str, str] | None = None,
) -> tuple[State, int]:
    """Return this rank's part of ``state``, checked, and its number of steps; see ``Reducer.load_state_dict``.

    ``labels`` are as in :func:`gather_state`; the result has the parameters' names.
    """
    labels = {name: name for name in current} if labels is None else labels
    saved = list(state) if isinstance(state, list | tuple) else [state]
    if not saved:
        raise ValueError("state is an empty list, wanted one or all ranks of one world size")
    for entry in saved:
        _check_header(entry, type(method).__name__, strict)
    sizes = {entry["world_size"] for entry in saved}
    if len(sizes) != 1:
        raise ValueError(f"state lists ranks of world sizes {sorted(sizes)}, wanted one or all ranks of one")
    ranks = [(int(rank), content) for entry in saved for rank, content in entry["ranks"].items()]
    wanted = {labels[name]: entry for name, entry in current.items()}
    mine = renamed(_select_rank(join_parts(ranks), sizes.pop(), communicator), wanted)
    mine = select_parts(mine, wanted, strict)
    _check_entries(mine, wanted, strict)
    return {name: mine[labels[name]] for name in current if labels[name] in mine}, saved[0]["steps"]


def _check_header(saved: Any, method: str, strict: bool) -> None:
    if isinstance(saved, dict) and "format" in saved and saved["format"] != _FORMAT:
        raise ValueError(f"state has format {saved['format']}, this pycomm reads {_FORMAT}")
    if not isinstance(saved, dict) or not saved.keys() >= _KEYS or not isinstance(saved["ranks"], dict):
        raise ValueError("state is neither a Reducer.state_dict() nor a list of them")
    if not all(str(rank).isdecimal() and isinstance(content, dict) for rank, content in saved["ranks"].items()):
        raise ValueError("state is not a Reducer.state_dict(): its 'ranks' are not numbered")
    for key, least in (("world_size", 1), ("steps", 0)):
        value = saved[key]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise ValueError(f"state[{key!r}] is {shown(value)}, wanted an int of at least {least}")
    for rank, content in saved["ranks"].items():
        _check_content(f"state['ranks'][{rank!r}]", content)
    if strict and saved["method"] != method:
        raise ValueError(f"state is from compression {saved['method']}, wanted {method} (strict=False loads what fits)")


def _check_content(where: str, content: dict[Any, Any]) -> None:
    """Raise ValueError unless ``content`` maps parameter names to dense tensors by key."""
    for name, entry in content.items():
        if not isinstance(name, str) or not isinstance(entry, dict):
            raise ValueError(f"{where}[{name!r}] is a {type(entry).__name__}, wanted tensors by key")
        for key, tensor in entry.items():
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
                raise ValueError(f"{where}[{name!r}][{key!r}] is a {type(tensor).__name__}, wanted a dense tensor")


def _select_rank(ranks: list[tuple[int, State]], size: int, communicator: Communicator) -> State:
    """Return this rank's own state if the world size is unchanged, any rank's if all are equal, or a part of all."""
    numbers = sorted(rank for rank, _ in ranks)
    if size == communicator.size and numbers.count(communicator.rank) == 1:
        return dict(ranks)[communicator.rank]
    if ranks and not any(key in CONTRIBUTIONS for _, state in ranks for entry in state.values() for key in entry):
        return ranks[0][1]
    if len(numbers) == size and numbers == list(range(size)):
        return _reshard(ranks, communicator)
    raise ValueError(
        f"state is from rank(s) {numbers} of {size}, this is rank {communicator.rank} of {communicator.size}: pass the "
        "list of all ranks' state_dicts, or one that has them all (of a distributed checkpoint: "
        "torch.distributed.checkpoint.format_utils.dcp_to_torch_save)"
    )


def _reshard(ranks: Sequence[tuple[int, State]], communicator: Communicator) -> State:
    """Return the state of every old rank ``r`` with ``r % size`` equal to this rank; sums over ranks are kept."""
    total: State = {}
    for rank, state in ranks:
        is_mine = rank % communicator.size == communicator.rank
        for name, entry in state.items():
            for key, tensor in entry.items():
                slot = total.setdefault(name, {})
                if key not in CONTRIBUTIONS:
                    slot[key] = tensor
                    continue
                part = tensor if is_mine else torch.zeros_like(tensor)
                if key in slot and slot[key].shape != part.shape:
                    raise ValueError(f"state[{name!r}][{key!r}] has different shapes on different ranks")
                if part.dtype not in _SUMMED:
                    raise ValueError(f"state[{name!r}][{key!r}] has dtype {part.dtype}, of which there are no sums")
                slot[key] = part if key not in slot else slot[key] + part
    return total


def _check_entries(mine: State, wanted: State, strict: bool) -> None:
    missing, unknown = wanted.keys() - mine.keys(), mine.keys() - wanted.keys()
    if strict and (missing or unknown):
        raise ValueError(
            f"state does not fit the parameters: missing {sorted(missing)}, unknown {sorted(unknown)} "
            "(strict=False loads what fits)"
        )
    for name in sorted(wanted.keys() & mine.keys()):
        for key in sorted(wanted[name].keys() | mine[name].keys()):
            tensor, found = wanted[name].get(key), mine[name].get(key)
            if strict and tensor is None:
                raise ValueError(f"state[{name!r}] has {key!r}, which {sorted(wanted[name])} do not include")
            if tensor is None or (found is None and not strict):
                continue
            if found is None or found.shape != tensor.shape:
                there = "nothing" if found is None else list(found.shape)
                raise ValueError(f"state[{name!r}][{key!r}] is {there}, wanted shape {list(tensor.shape)}")
            if found.is_complex() or found.is_floating_point() != tensor.is_floating_point():
                raise ValueError(f"state[{name!r}][{key!r}] has dtype {found.dtype}, wanted {tensor.dtype}")


def _split_label(label: str) -> tuple[str, str]:
    """Return the name and the part in a key; the part of a whole parameter is empty."""
    found = _LABEL.fullmatch(label)
    return (label, "") if found is None else (found["name"], found["part"])


def join_parts(ranks: Sequence[tuple[int, State]]) -> list[tuple[int, State]]:
    """Merge the states of a rank that were saved separately because they hold different parts of DTensors.

    Their common entries are equal, and are taken from the first. State that names the same parts, or none, for the
    same rank twice is left as it is.
    """
    joined: list[tuple[int, State]] = []
    for rank, state in ranks:
        parts = {label for label in state if _split_label(label)[1]}
        earlier = next((i for i, (other, _) in enumerate(joined) if other == rank), None)
        if earlier is None or not parts or parts & joined[earlier][1].keys():
            joined.append((rank, state))
        else:
            joined[earlier] = (rank, {**state, **joined[earlier][1]})
    return joined


def select_parts(saved: State, wanted: State, strict: bool) -> State:
    """Return ``saved`` without the parts of other ranks."""
    own = dict(map(_split_label, wanted))
    by_name: dict[str, list[str]] = {}
    for label in saved:
        name, part = _split_label(label)
        by_name.setdefault(name, []).append(part)
    for name, part in own.items():
        found = by_name.get(name, [part])
        if strict and part not in found:
            raise ValueError(
                f"state of {name!r} is of {_described(sorted(found))}, this rank has {_described([part])}: load it "
                "where as many ranks share a parameter as when it was saved, each rank its own part "
                "(dimension:number/count)"
            )
    return {label: entry for label, entry in saved.items() if label in wanted or _split_label(label)[0] not in own}


def _described(parts: Sequence[str]) -> str:
    return f"part {' and '.join(parts)}" if any(parts) else "the whole parameter"
