"""``pycomm checkpoint show``: what :func:`pycomm.save` has written to a folder, and whether it is whole."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pycomm.descriptions import size_text
from pycomm.tools.cli.arguments import complain, say
from pycomm.tools.cli.table import table
from pycomm.training.checkpoint.folder import OWN, SHARED, Checkpoint, checkpoints_in, unfinished_in
from pycomm.training.checkpoint.values import Node, dtype_called
from pycomm.untrusted import one_line, path_of


def run(arguments: argparse.Namespace) -> int:
    """Print the checkpoints in a folder and the contents of the last whole one; return the exit code."""
    folder: Path = arguments.folder
    try:
        paths = checkpoints_in(path_of(folder))
        unfinished = [] if paths == [folder] else unfinished_in(folder)
    except (OSError, ValueError) as error:
        complain(f"pycomm checkpoint show: {error}")
        return 1
    found = {path: _look(path) for path in paths}
    say(table(["checkpoint", "ranks", "size", "state"], [_row(path, *each) for path, each in found.items()]))
    damages = {path: damage for path, (_, damage) in found.items() if damage}
    for path, damage in damages.items():
        complain(f"{path.name} is damaged: {damage.replace(f'{path}/', '')}")
    for path in unfinished:
        complain(f"{path.name} is unfinished: a save is under way, or was cut short")
    last = next((checkpoint for checkpoint, damage in reversed(found.values()) if checkpoint and not damage), None)
    if last is not None:
        _say_contents(last)
    return 1 if damages else 0


def _look(path: Path) -> tuple[Checkpoint | None, str]:
    """Return a checkpoint, unless its manifest cannot be read, and its damage. Reads every file once."""
    checkpoint = None
    try:
        checkpoint = Checkpoint(path)
        checkpoint.check(set(range(checkpoint.world_size)))
    except (OSError, ValueError) as error:
        return checkpoint, str(error)
    return checkpoint, ""


def _row(path: Path, checkpoint: Checkpoint | None, damage: str) -> list[str]:
    state = "damaged" if damage else "whole"
    if checkpoint is None:
        return [path.name, "", "", state]
    size = sum(wanted["bytes"] for _, wanted in checkpoint.files())
    return [path.name, str(checkpoint.world_size), size_text(size), state]


def _say_contents(checkpoint: Checkpoint) -> None:
    sections, tensors = [], []
    for rank, kind, name in _sections(checkpoint):
        places = _places_of(checkpoint, rank, kind, name)
        counts = Counter(place["dtype"] for place in places.values())
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in counts.items())
        owner = "all ranks" if kind == SHARED else f"rank {rank}"
        sections.append([name, owner, dtypes, size_text(sum(map(_num_bytes, places.values())))])
        if name in ("model", "buffers") and rank == 0:
            tensors += [[*row, name] for row in _named(checkpoint.parts[rank][kind][name], places)]
    files = [
        [str(path.relative_to(checkpoint.path)), f"{wanted['bytes']:,}", f"{wanted['crc32']:08x}"]
        for path, wanted in checkpoint.files()
    ]
    say(f"\n{checkpoint.path.name}:\n")
    say(table(["section", "of", "tensors", "size"], sections))
    say("\n" + table(["tensor", "type", "elements", "section"], tensors))
    say("\n" + table(["file", "bytes", "CRC-32"], files))


def _sections(checkpoint: Checkpoint) -> Iterator[tuple[int, str, str]]:
    """Yield for each section a rank that has saved it, its kind and its name."""
    for name in checkpoint.parts[0][SHARED]:
        yield 0, SHARED, name
    for rank in range(checkpoint.world_size):
        for name in checkpoint.parts[rank][OWN]:
            yield rank, OWN, name


def _places_of(checkpoint: Checkpoint, rank: int, kind: str, name: str) -> dict[str, dict[str, Any]]:
    """Return the places of a section's tensors by their numbers. Each rank has a share of the places of all ranks."""
    parts = checkpoint.parts if kind == SHARED else [checkpoint.parts[rank]]
    every = (item for part in parts for item in part["indexes"][kind]["tensors"].items())
    return {key.removeprefix(f"{name}/"): place for key, place in every if key.rpartition("/")[0] == name}


def _named(node: Node, places: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    """Yield name, type and number of elements of the tensors in a dict."""
    for name, item in node[1] if node[0] == "dict" else ():
        place = places.get(str(item[1])) if item[0] == "tensor" else None
        if place is not None:
            yield [one_line(str(name)), f"{place['dtype']} {place['shape']}", f"{math.prod(place['shape']):,}"]


def _num_bytes(place: dict[str, Any]) -> int:
    return int(math.prod(place["shape"]) * dtype_called(place["dtype"], "a tensor").itemsize)
