"""A checkpoint as one rank reads it."""

from __future__ import annotations

from typing import Any

import torch

from pycomm.checkpoint.files import DamagedError
from pycomm.checkpoint.folder import OWN, SHARED, Checkpoint, part_of
from pycomm.checkpoint.storage import read_tensors
from pycomm.checkpoint.values import decode, positions_in

_OF_MODEL = ("model", "optimizer")
"""Sections that rank 0's cannot stand in for, if each rank had its own."""


class Saved:
    """Values of ``checkpoint``, which has been checked, for rank ``rank`` of ``size``.

    Attributes:
        has_own: whether there was a rank of that number.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, size: int) -> None:
        self._checkpoint, self._rank, self._size = checkpoint, rank, size
        self.has_own = rank < checkpoint.world_size
        self._writers = {
            name: writer for writer in range(checkpoint.world_size) for name in self._index(writer, SHARED)["tensors"]
        }

    def names(self, prefix: str) -> list[str]:
        """Return the names of the sections that begin with ``prefix``, without it."""
        parts = (self._shared(), self._own(self._rank if self.has_own else 0))
        return [name.removeprefix(prefix) for sections in parts for name in sections if name.startswith(prefix)]

    def value(self, name: str, old: Any = None) -> Any:
        """Return the value of section ``name``: this rank's, or rank 0's if there was none of that number.

        Raises:
            ValueError: other numbers of ranks had models of their own.


        Args:
            name: of the section.
            old: this process's own value, from which objects that are not saved are taken.
        """
        if name in self._shared():
            return self._decoded(name, self._shared()[name], None, old)
        if name in _OF_MODEL and self._size != self._checkpoint.world_size:
            raise ValueError(
                f"each rank has saved {name} values of its own (attach had ignore or optimizer_state in its Tuning), "
                f"{self._checkpoint.world_size} ranks in all: there are {self._size} here, wanted as many"
            )
        return self._value_of(name, self._rank if self.has_own else 0, old)

    def of_all(self, name: str) -> list[Any]:
        """Return the value of each rank, if there were more or fewer than now; otherwise this rank's alone."""
        same = self._checkpoint.world_size == self._size
        return [self._value_of(name, rank) for rank in ([self._rank] if same else range(self._checkpoint.world_size))]

    def _value_of(self, name: str, rank: int, old: Any = None) -> Any:
        node = self._own(rank).get(name)
        if node is None:
            raise DamagedError(f"{part_of(self._checkpoint.path, rank)} has no {name}")
        return self._decoded(name, node, rank, old)

    def _shared(self) -> dict[str, Any]:
        sections: dict[str, Any] = self._checkpoint.parts[0][SHARED]
        return sections

    def _own(self, rank: int) -> dict[str, Any]:
        sections: dict[str, Any] = self._checkpoint.parts[rank][OWN]
        return sections

    def _index(self, rank: int, kind: str) -> dict[str, Any]:
        index: dict[str, Any] = self._checkpoint.parts[rank]["indexes"][kind]
        return index

    def _decoded(self, name: str, node: list[Any], rank: int | None, old: Any) -> Any:
        """Return the value of ``node``, whose tensors ``rank`` has saved, or each rank some."""
        positions = sorted(positions_in(node))
        names = {f"{name}/{i}": i for i in positions}
        tensors: dict[int, torch.Tensor] = {}
        for writer in range(self._checkpoint.world_size) if rank is None else [rank]:
            kind = SHARED if rank is None else OWN
            here = [each for each in names if rank is not None or self._writers.get(each) == writer]
            index = self._index(writer, kind)
            found = read_tensors(part_of(self._checkpoint.path, writer) / kind, index, here)
            tensors.update({names[each]: tensor for each, tensor in found.items()})
        missing = next((each for each, i in names.items() if i not in tensors), None)
        if missing is not None:
            raise DamagedError(f"{self._checkpoint.path} has no place of {missing}")
        try:
            return decode(node, [tensors[i] for i in positions], name, **({} if old is None else {"old": old}))
        except RecursionError:
            raise DamagedError(f"{name} in {self._checkpoint.path} is nested too deeply to be read") from None
