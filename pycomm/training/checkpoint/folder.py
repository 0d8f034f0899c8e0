"""Folder of checkpoints: its layout, and how one rank reads a checkpoint.

::

    checkpoint-00000007/           complete: it gets this name once everything in it is on disk
        manifest.json              format, number of ranks, checksums of all parts
        rank-0/part.json           values, places of tensors, checksums of the files beside
        rank-0/shared/tensors      this rank's share of what is equal on all ranks: parameters, optimizer state
        rank-0/own/tensors         what differs between ranks
    .writing-1c9a05b2/             incomplete
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pycomm.training.checkpoint.files import DamagedError, check_file, check_size, checked, read_json, read_sealed
from pycomm.training.checkpoint.torch_files import read_tensors
from pycomm.training.checkpoint.values import check_node, decode, positions_in
from pycomm.untrusted import ANYTHING, COUNT, ListOf, MapOf, Number

FORMAT = 1
OWN, SHARED = "own", "shared"

MOST_NUMBER = 10**17  # of a checkpoint that is named after its step
_NAME = re.compile(r"checkpoint-([0-9]{8}|[1-9][0-9]{8,17})")
_WRITING = ".writing-"
_REMOVING = ".removing-"

_SUM = {"bytes": COUNT, "crc32": Number(0, 2**32 - 1, whole=True)}
_PLACE = {"dtype": str, "shape": ListOf(COUNT), "stride": ListOf(COUNT), "file": str, "offset": COUNT, "length": COUNT}
_INDEX = {"files": MapOf(_SUM), "tensors": MapOf(_PLACE)}
_PART = {OWN: MapOf(ANYTHING), SHARED: MapOf(ANYTHING), "indexes": {OWN: _INDEX, SHARED: _INDEX}}
_MANIFEST = {"format": COUNT, "parts": ListOf({"bytes": COUNT, "blake2b": str})}


def numbers_in(folder: Path) -> list[int]:
    """Return the sorted numbers of the checkpoints in ``folder``; none if it does not exist."""
    try:
        return sorted(int(found[1]) for entry in folder.iterdir() if (found := _NAME.fullmatch(entry.name)))
    except FileNotFoundError:
        return []


def whole(folder: Path, number: int) -> Path:
    return folder / f"checkpoint-{number:08d}"


def unfinished(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint while it is being written, under a unique ``name``."""
    return folder / f"{_WRITING}{name}"


def part_of(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"rank-{rank}"


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints that earlier processes did not finish."""
    for entry in list(folder.iterdir()):
        if entry.name.startswith((_WRITING, _REMOVING)):
            _remove(entry)


def _remove(path: Path) -> None:
    """Remove a file, a link, or a directory with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints older than the last ``keep`` that look complete."""
    newer = 0
    for number in reversed(numbers_in(folder)):
        if newer >= keep:
            aside = folder / f"{_REMOVING}{number:08d}"
            whole(folder, number).rename(aside)  # atomically: no incomplete checkpoint may have that name
            _remove(aside)
            continue
        with contextlib.suppress(DamagedError, ValueError):
            Checkpoint(whole(folder, number))
            newer += 1


def _check_sizes(index: dict[str, Any], path: Path) -> None:
    """Raise DamagedError if the tensors in ``index`` add up to more than their files hold, as overlapping ones may."""
    sizes: Counter[str] = Counter()
    for entry in index["tensors"].values():
        sizes[entry["file"]] += entry["length"]
    for name, wanted in index["files"].items():
        if sizes[name] > wanted["bytes"]:
            raise DamagedError(f"{path} says that {name} has {sizes[name]} bytes of tensors in {wanted['bytes']}")


class Checkpoint:
    """Checkpoint on disk. The constructor reads its manifest and parts, and compares the files' sizes.

    Attributes:
        parts: what each rank has saved, without tensors.
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
        """Raise DamagedError unless all shared files, and the own files of ``ranks``, match their checksums."""
        for rank in range(self.world_size):
            for file, wanted in self._files(rank, (OWN, SHARED) if rank in ranks else (SHARED,)):
                check_file(file, wanted)

    def _files(self, rank: int, kinds: tuple[str, ...]) -> Iterator[tuple[Path, dict[str, Any]]]:
        for kind in kinds:
            for name, wanted in self.parts[rank]["indexes"][kind]["files"].items():
                if Path(name).name != name:
                    raise DamagedError(f"{self.path} names a file outside of itself: {name}")
                yield part_of(self.path, rank) / kind / name, wanted


_OF_MODEL = ("model", "optimizer")
"""Sections that a new rank cannot take from rank 0 if they differed between ranks."""


class Saved:
    """Values of a ``checkpoint``, already checked, for rank ``rank`` of ``size``.

    Attributes:
        has_own: whether a rank of that number has saved it.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, size: int) -> None:
        self._checkpoint, self._rank, self._size = checkpoint, rank, size
        self._parts: list[Any] = checkpoint.parts
        self.has_own = rank < checkpoint.world_size
        self._writers = {
            name: writer for writer, part in enumerate(self._parts) for name in part["indexes"][SHARED]["tensors"]
        }

    def names(self, prefix: str) -> list[str]:
        """Return the names of the sections that begin with ``prefix``, without it."""
        parts = self._parts[0][SHARED], self._parts[self._rank if self.has_own else 0][OWN]
        return [name.removeprefix(prefix) for sections in parts for name in sections if name.startswith(prefix)]

    def value(self, name: str, old: Any = None) -> Any:
        """Return the value of section ``name``: this rank's, or rank 0's if no rank of that number has saved it.

        Args:
            old: this process's present value, which supplies objects that cannot be saved.
        """
        if name in self._parts[0][SHARED]:
            return self._decoded(name, self._parts[0][SHARED][name], None, old)
        if name in _OF_MODEL and self._size != self._checkpoint.world_size:
            raise ValueError(
                f"each rank has saved {name} values of its own (attach had ignore in its Tuning), "
                f"{self._checkpoint.world_size} ranks in all: there are {self._size} here, wanted as many"
            )
        return self._value_of(name, self._rank if self.has_own else 0, old)

    def of_all(self, name: str) -> list[Any]:
        """Return this rank's value, or those of all saved ranks if their number has changed."""
        same = self._checkpoint.world_size == self._size
        return [self._value_of(name, rank) for rank in ([self._rank] if same else range(self._checkpoint.world_size))]

    def _value_of(self, name: str, rank: int, old: Any = None) -> Any:
        node = self._parts[rank][OWN].get(name)
        if node is None:
            raise DamagedError(f"{part_of(self._checkpoint.path, rank)} has no {name}")
        return self._decoded(name, node, rank, old)

    def _decoded(self, name: str, node: list[Any], rank: int | None, old: Any) -> Any:
        """Return the value of ``node``, whose tensors were saved by ``rank``, or by all ranks if it is ``None``."""
        positions = sorted(positions_in(node))
        names = {f"{name}/{i}": i for i in positions}
        tensors: dict[int, torch.Tensor] = {}
        for writer in range(self._checkpoint.world_size) if rank is None else [rank]:
            kind = SHARED if rank is None else OWN
            here = [each for each in names if rank is not None or self._writers.get(each) == writer]
            index = self._parts[writer]["indexes"][kind]
            found = read_tensors(part_of(self._checkpoint.path, writer) / kind, index, here)
            tensors.update({names[each]: tensor for each, tensor in found.items()})
        missing = next((each for each, i in names.items() if i not in tensors), None)
        if missing is not None:
            raise DamagedError(f"{self._checkpoint.path} has no place of {missing}")
        try:
            return decode(node, [tensors[i] for i in positions], name, **({} if old is None else {"old": old}))
        except RecursionError:
            raise DamagedError(f"{name} in {self._checkpoint.path} is nested too deeply to be read") from None
