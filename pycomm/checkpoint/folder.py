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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pycomm.checkpoint.files import DamagedError, check_file, check_size, checked, read_json, read_sealed
from pycomm.checkpoint.values import check_node
from pycomm.untrusted import ANYTHING, COUNT, ListOf, MapOf, Number

FORMAT = 1
OWN, SHARED = "own", "shared"

_NAME = re.compile(r"checkpoint-([0-9]{8}|[1-9][0-9]{8,})")
_WRITING = ".writing-"
_REMOVING = ".removing-"

_SUM = {"bytes": COUNT, "crc32": Number(0, 2**32 - 1, whole=True)}
_PLACE = {"dtype": str, "shape": ListOf(COUNT), "stride": ListOf(COUNT), "file": str, "offset": COUNT, "length": COUNT}
_INDEX = {"files": MapOf(_SUM), "tensors": MapOf(_PLACE)}
_PART = {OWN: MapOf(ANYTHING), SHARED: MapOf(ANYTHING), "indexes": {OWN: _INDEX, SHARED: _INDEX}}
_MANIFEST = {"format": COUNT, "parts": ListOf({"bytes": COUNT, "blake2b": str})}


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
            _remove(entry)


def _remove(path: Path) -> None:
    """Remove what is at ``path``: a directory with all that is in it, but of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints before the last ``keep`` ones that look whole."""
    newer = 0
    for number in reversed(numbers_in(folder)):
        if newer >= keep:
            aside = folder / f"{_REMOVING}{number:08d}"
            whole(folder, number).rename(aside)  # at once, so that there is never half a checkpoint of that name
            _remove(aside)
            continue
        with contextlib.suppress(DamagedError, ValueError):
            Checkpoint(whole(folder, number))
            newer += 1


def _check_sizes(index: dict[str, Any], path: Path) -> None:
    """Raise DamagedError if the tensors in ``index`` together are larger than their files: many may name one place."""
    sizes: Counter[str] = Counter()
    for entry in index["tensors"].values():
        sizes[entry["file"]] += entry["length"]
    for name, wanted in index["files"].items():
        if sizes[name] > wanted["bytes"]:
            raise DamagedError(f"{path} says that {name} has {sizes[name]} bytes of tensors in {wanted['bytes']}")


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
        checked(manifest, {"format": COUNT}, str(path / "manifest.json"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"{path} has format {manifest['format']}, this pycomm reads {FORMAT}")
        checked(manifest, _MANIFEST, str(path / "manifest.json"))
        if not manifest["parts"]:
            raise DamagedError(f"{path / 'manifest.json'} names no parts")
        self.parts = [self._part(rank, wanted) for rank, wanted in enumerate(manifest["parts"])]
        for rank in range(self.world_size):
            for file, wanted in self._files(rank, (OWN, SHARED)):
                check_size(file, wanted["bytes"])

    def _part(self, rank: int, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return what a rank has saved besides tensors."""
        path = part_of(self.path, rank) / "part.json"
        part = read_json(path, wanted)
        checked(part, _PART, str(path))
        for kind in (OWN, SHARED):
            for name, node in part[kind].items():
                check_node(node, f"{path}: {name}")
            _check_sizes(part["indexes"][kind], path)
        return part

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
