"""Folder of checkpoints: what is where in it.

::

    checkpoint-00000007/           whole: it got this name when everything in it was on disk
        manifest.json              format, number of ranks, checksums of all parts
        rank-0/part.json           values, where tensors are, checksums of the files beside
        rank-0/shared/__0_0.distcp this rank's share of what all ranks have: parameters, the optimizer's state
        rank-0/own/__0_0.distcp    what this rank alone has
    .writing-1c9a05b2/             not whole, or not yet
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pycomm.checkpoint.files import DamagedError, check_file, check_size, read_json, read_sealed

FORMAT = 1
OWN, SHARED = "own", "shared"

_NAME = re.compile(r"checkpoint-(\d{8,})")
_WRITING = ".writing-"
_REMOVING = ".removing-"


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers of the checkpoints in ``folder``, in rising order; none if there is no such folder."""
    try:
        return sorted(int(found[1]) for entry in folder.iterdir() if (found := _NAME.fullmatch(entry.name)))
    except FileNotFoundError:
        return []


def whole(folder: Path, number: int) -> Path:
    """Return the path of checkpoint ``number``."""
    return folder / f"checkpoint-{number:08d}"


def unfinished(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint while it is written; its ``name`` is no other's."""
    return folder / f"{_WRITING}{name}"


def part_of(checkpoint: Path, rank: int) -> Path:
    """Return the path of the part of ``rank``."""
    return checkpoint / f"rank-{rank}"


def remove_unfinished(folder: Path) -> None:
    """Remove what earlier processes have left unfinished."""
    for entry in list(folder.iterdir()):
        if entry.name.startswith((_WRITING, _REMOVING)):
            shutil.rmtree(entry)


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints before the last ``keep`` ones that look whole."""
    newer = 0
    for number in reversed(numbers_in(folder)):
        if newer >= keep:
            aside = folder / f"{_REMOVING}{number:08d}"
            whole(folder, number).rename(aside)  # at once, so that there is never half a checkpoint of that name
            shutil.rmtree(aside)
            continue
        with contextlib.suppress(DamagedError, ValueError):
            Checkpoint(whole(folder, number))
            newer += 1


class Checkpoint:
    """Checkpoint on disk. Making one reads its manifest and parts, and compares the files' sizes.

    Attributes:
        path: the directory.
        parts: what each rank has saved besides tensors.

    Raises:
        DamagedError: it is not whole.
        ValueError: it has another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = read_sealed(path / "manifest.json")
        if manifest.get("format") != FORMAT:
            raise ValueError(f"{path} has format {manifest.get('format')}, this pycomm reads {FORMAT}")
        self.parts: list[dict[str, Any]] = [
            read_json(part_of(path, rank) / "part.json", wanted) for rank, wanted in enumerate(manifest["parts"])
        ]
        for rank in range(self.world_size):
            for file, wanted in self._files(rank, (OWN, SHARED)):
                check_size(file, wanted["bytes"])

    @property
    def world_size(self) -> int:
        """Number of ranks that have saved it."""
        return len(self.parts)

    def check(self, ranks: set[int]) -> None:
        """Raise DamagedError unless all that ranks share, and what ``ranks`` have of their own, is as it was written.

        Reads the files once.
        """
        for rank in range(self.world_size):
            for file, wanted in self._files(rank, (OWN, SHARED) if rank in ranks else (SHARED,)):
                check_file(file, wanted)

    def _files(self, rank: int, kinds: tuple[str, ...]) -> Iterator[tuple[Path, dict[str, Any]]]:
        for kind in kinds:
            for name, wanted in self.parts[rank]["indexes"][kind]["files"].items():
                if Path(name).name != name:
                    raise DamagedError(f"{self.path} names a file outside of itself: {name}")
                yield part_of(self.path, rank) / kind / name, wanted
