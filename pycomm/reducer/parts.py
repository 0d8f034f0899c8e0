"""Parts of DTensors in saved state: each has a key of its own, so that no rank's state is taken for another's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from pycomm.compression.base import State
from pycomm.optim.shards import dimensions_of, is_split_in
from pycomm.torch_internals import is_dtensor

_LABEL = re.compile(r"(?P<name>.+)\[(?P<part>\d+:\d+/\d+(,\d+:\d+/\d+)*)\]")


def part_of(param: torch.Tensor) -> str:
    """Return which part of ``param`` this rank has: "0:1/2" is the second half along dimension 0; "" for the whole."""
    if not is_dtensor(param):
        return ""
    parts = []
    for dimension, group in dimensions_of(param):
        if is_split_in(param, dimension):
            placement = param.placements[dimension]
            parts.append(f"{placement.dim}:{group.rank()}/{group.size()}")
    return ",".join(parts)


def labels_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the keys of parameters in saved state: names, with the part that this rank has of those that are split."""
    return {name: f"{name}[{part}]" if (part := part_of(param)) else name for name, param in named}


def _split_label(label: str) -> tuple[str, str]:
    """Return the name and the part in a key; the part of a whole parameter is empty."""
    found = _LABEL.fullmatch(label)
    return (label, "") if found is None else (found["name"], found["part"])


def join_parts(ranks: Sequence[tuple[int, State]]) -> list[tuple[int, State]]:
    """Return the state of each rank in one piece, if ranks that hold different parts of DTensors have saved it apart.

    What such ranks have in common is the same in all of them, and is taken from the first. State that names the same
    parts, or none, for the same rank twice is left as it is.
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
    """Return ``saved`` without the parts of other ranks.

    Raises:
        ValueError: ``strict``, and a parameter was saved in other parts than those that ``wanted`` names.
    """
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
