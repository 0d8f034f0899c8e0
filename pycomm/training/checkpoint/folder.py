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
import logging
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pycomm.training.checkpoint.files import DamagedError, check_file, check_size, checked, read_json, read_sealed
from pycomm.training.checkpoint.torch_files import read_tensors
from pycomm.training.checkpoint.values import check_node, decode, positions_in, without_foreign
from pycomm.untrusted import ANYTHING, COUNT, ListOf, MapOf, Number, OneOf, one_line, path_of

_LOG = logging.getLogger("pycomm")

FORMAT = 1
OWN, SHARED = "own", "shared"
STATEFUL, PLAIN = "stateful/", "plain/"
"""Prefixes of the names of sections that hold the user's own values."""

MOST_NUMBER = 10**17  # of a checkpoint that is named after its step
_NAME = re.compile(r"checkpoint-([0-9]{8}|[1-9][0-9]{8,17})")
_WRITING = ".writing-"
_REMOVING = ".removing-"

_SUM = {"bytes": COUNT, "crc32": Number(0, 2**32 - 1, whole=True)}
_PLACE = {"dtype": str, "shape": ListOf(COUNT), "stride": ListOf(COUNT), "file": str, "offset": COUNT, "length": COUNT}
_INDEX = {"files": MapOf(_SUM), "tensors": MapOf(_PLACE)}
_PART = {OWN: MapOf(ANYTHING), SHARED: MapOf(ANYTHING), "indexes": {OWN: _INDEX, SHARED: _INDEX}}
_MANIFEST = {"format": COUNT, "parts": ListOf({"bytes": COUNT, "blake2b": str})}
_SECTIONS: dict[str, Any] = {
    "model": MapOf(torch.Tensor),
    "buffers": MapOf(torch.Tensor),
    "aliases": MapOf(str),
    "extra": MapOf(ANYTHING),
    "compression": {"format": COUNT, "world_size?": COUNT, "steps?": COUNT, "ranks?": MapOf(ANYTHING)},
    "optimizer": {
        "class": str,
        "names": ListOf(OneOf(None, str)),
        "state_dict": {
            "state": MapOf(MapOf(ANYTHING, key=ANYTHING), key=ANYTHING),
            "param_groups": ListOf({"params": ListOf(COUNT)}),
        },
    },
}
"""Shapes of sections. Others are their owners' to check."""


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


def unfinished_in(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder`` that are being written, or whose writing was interrupted."""
    return sorted(entry for entry in folder.iterdir() if entry.name.startswith(_WRITING))


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
        for file, wanted in self.files():
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

    def files(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield the files of tensors, with the ``bytes`` and ``crc32`` that they should have."""
        for rank in range(self.world_size):
            yield from self._files(rank, (OWN, SHARED))

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
            old: this process's present value, which supplies objects that cannot be saved. Without it they are left
                out of the dicts that they were in.
        """
        if name in self._parts[0][SHARED]:
            return self._decoded(name, self._parts[0][SHARED][name], None, old)
        if name in _OF_MODEL and self._size != self._checkpoint.world_size:
            raise ValueError(
                f"each rank has saved {name} values of its own (attach had ignore in its Tuning), "
                f"{self._checkpoint.world_size} ranks in all: there are {self._size} here, wanted as many"
            )
        return self._value_of(name, self._rank if self.has_own else 0, old)

    def state_dicts(self) -> StateDicts:
        """Return what needs no other object to be read."""
        model = {**self.value("model"), **self.value("buffers")}
        # Older checkpoints have no aliases.
        aliases = self.value("aliases") if "aliases" in self.names("") else {}
        model |= {name: model[first] for name, first in aliases.items() if first in model}
        for name, state in self.value("extra").items():
            model[f"{name}._extra_state" if name else "_extra_state"] = state
        plain = {name: self.value(PLAIN + name) for name in self.names(PLAIN)}
        return StateDicts(model, self.value("optimizer")["state_dict"], plain)

    def of_all(self, name: str) -> list[Any]:
        """Return this rank's value, or all saved ranks' values if the number of ranks has changed."""
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
        read = [tensors[i] for i in positions]
        try:
            value = decode(without_foreign(node), read, name) if old is None else decode(node, read, name, old)
        except RecursionError:
            raise DamagedError(f"{name} in {self._checkpoint.path} is nested too deeply to be read") from None
        return checked(value, _SECTIONS.get(name, ANYTHING), f"{self._checkpoint.path}: {name}")


class StateDicts(NamedTuple):
    """What :func:`state_dicts` returns.

    Attributes:
        model: parameters, persistent buffers and extra state by the names of ``model.state_dict()`` without wrappers
            such as torch.compile or DistributedDataParallel; tensors in CPU memory.
        optimizer: the optimizer's ``state_dict()``, with float32 master weights if there were any.
        plain: the plain values that were saved, such as ``step``, by name.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    plain: dict[str, Any]


def state_dicts(path: str | os.PathLike[str], *, rank: int = 0) -> StateDicts:
    """Read the last complete checkpoint that :func:`pycomm.save` has written to ``path``, in one process.

    For evaluation and other tools: it needs neither ranks nor ``attach``, and ``model.load_state_dict(found.model)``
    works as usual. Every file is compared with its checksum. As in :func:`pycomm.load`, a damaged checkpoint is skipped
    with a warning. Nothing is unpickled. Options of the optimizer that are neither numbers, text nor tensors were not
    saved, and are absent.

    Args:
        path: the directory given to ``save``, or one of the checkpoints in it.
        rank: whose values to return where ranks had different ones, as buffers often have.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no checkpoint in ``path``.
        ValueError: every checkpoint is damaged, or no rank of that number has saved.
    """
    checkpoint = _last_whole(path_of(path))
    if not 0 <= rank < checkpoint.world_size:
        raise ValueError(f"rank is {rank}, wanted 0 to {checkpoint.world_size - 1}: {checkpoint.path} has no others")
    return Saved(checkpoint, rank, checkpoint.world_size).state_dicts()


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints in ``path``, oldest first, or ``path`` itself if it is one.

    Raises:
        FileNotFoundError, NotADirectoryError: there are none; says what ``path`` is, as far as that can be told.
    """
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file, wanted the folder passed to pycomm.save")
    if _NAME.fullmatch(path.name) and (path / "manifest.json").exists():
        return [path]
    found = [whole(path, number) for number in numbers_in(path)]
    if found:
        return found
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    if path.name.startswith(_WRITING) or unfinished_in(path):
        raise FileNotFoundError(f"{path} has only an unfinished checkpoint: a save that is under way, or was cut short")
    what = "torch.distributed.checkpoint" if (path / ".metadata").exists() else "something else than pycomm.save"
    hint = f", and {what} wrote its files" if any(path.iterdir()) else ""
    raise FileNotFoundError(f"there is no checkpoint in {path}{hint}")


def _number_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _last_whole(folder: Path) -> Checkpoint:
    damages = []
    for path in reversed(checkpoints_in(folder)):
        try:
            checkpoint = Checkpoint(path)
            checkpoint.check(set(range(checkpoint.world_size)))
        except DamagedError as error:
            damages.append(str(error))
            _LOG.warning("checkpoint %d in %s is skipped: %s", _number_of(path), path.parent, one_line(str(error)))
        else:
            return checkpoint
    raise ValueError(f"no checkpoint in {folder} is whole: {'; '.join(damages)}")
