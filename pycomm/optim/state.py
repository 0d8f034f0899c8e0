"""Saving compression state, and handing it out again, also to another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import State
from pycomm.optim.assembly import Lane
from pycomm.optim.settings import Settings

_FORMAT = 2
_CONTRIBUTIONS = ("residual", "velocity")
"""State that counts as its sum over the ranks; any other is equal on all of them."""


def _method(settings: Settings) -> str:
    return type(settings.compression).__name__


def _current(lanes: Sequence[Lane]) -> State:
    return {name: entry for lane in lanes for name, entry in lane.exchange.state().items()}


def gather_state(lanes: Sequence[Lane], settings: Settings, communicator: Communicator, steps: int) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "method": _method(settings),
        "rank": communicator.rank,
        "world_size": communicator.size,
        "steps": steps,
        "state": {
            name: {key: torch.empty(t.shape, dtype=t.dtype).copy_(t) for key, t in entry.items()}
            for name, entry in _current(lanes).items()
        },
    }


def select_state(
    state: dict[str, Any] | list[dict[str, Any]],
    lanes: Sequence[Lane],
    settings: Settings,
    communicator: Communicator,
    strict: bool,
) -> tuple[State, int]:
    """This rank's share of ``state``, checked, and how many steps it comes from; see ``Reducer.load_state_dict``."""
    saved = [state] if isinstance(state, dict) else list(state)
    for one in saved:
        _check_header(one, settings, strict)
    mine = _own(state, communicator) if isinstance(state, dict) else _reshard(saved, communicator)
    _check_entries(mine, _current(lanes), strict)
    return mine, saved[0]["steps"]


def _check_header(saved: Any, settings: Settings, strict: bool) -> None:
    if not isinstance(saved, dict) or not {"format", "method", "rank", "world_size", "steps", "state"} <= saved.keys():
        raise ValueError("state is no Reducer.state_dict() and no list of them")
    if saved["format"] != _FORMAT:
        raise ValueError(f"state has format {saved['format']}, this pycomm reads {_FORMAT}")
    if strict and saved["method"] != _method(settings):
        raise ValueError(
            f"state is of compression {saved['method']}, attach was given {_method(settings)} (strict=False loads what "
            "fits)"
        )


def _own(saved: dict[str, Any], communicator: Communicator) -> State:
    if (saved["rank"], saved["world_size"]) != (communicator.rank, communicator.size):
        raise ValueError(
            f"state was saved by rank {saved['rank']} of {saved['world_size']}, this is rank {communicator.rank} of "
            f"{communicator.size}: pass the list of all ranks' state_dicts"
        )
    state: State = saved["state"]
    return state


def _reshard(saved: Sequence[dict[str, Any]], communicator: Communicator) -> State:
    """Old rank ``r``'s state goes to new rank ``r % size``; sums over the ranks are kept."""
    ranks = sorted(one["rank"] for one in saved)
    sizes = {one["world_size"] for one in saved}
    if len(sizes) != 1 or ranks != list(range(next(iter(sizes), 0))):
        raise ValueError(f"state lists ranks {ranks} of world size(s) {sorted(sizes)}, wanted every rank of one, once")
    total: State = {}
    for one in saved:
        takes = one["rank"] % communicator.size == communicator.rank
        for name, entry in one["state"].items():
            for key, tensor in entry.items():
                slot = total.setdefault(name, {})
                if key not in _CONTRIBUTIONS:
                    slot[key] = tensor
                    continue
                share = tensor if takes else torch.zeros_like(tensor)
                slot[key] = share if key not in slot else slot[key] + share
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
