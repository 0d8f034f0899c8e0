"""Damage: bits that training cannot have changed, found on a rank; and which ranks a majority says are wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pycomm.errors import CommError


class DamageError(CommError):
    """A CommError that accuses ranks of data that they alone have, or that only memory can have spoiled.

    The ranks have all come to it together, in an exchange that was whole: the communicator can still be used.

    Attributes:
        ranks: those that are wrong, by their numbers in ``Reducer.world``; empty if no majority says which.
    """

    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[int], what: str, *, rank: int) -> DamageError:
        """Make the error of ``rank`` that accuses ``ranks``."""
        error = cls(f"rank {rank}: {what}", rank=rank, peer=next(iter(ranks), None), operation="backward", elapsed=0.0)
        error.ranks = tuple(ranks)
        return error

    def spares(self, rank: int) -> bool:
        """Return whether ``rank`` is among those that can go on without the others."""
        return bool(self.ranks) and rank not in self.ranks


def outvoted(by_rank: np.ndarray) -> list[int]:
    """Return the rows that differ from what more than half of the rows have, in any column; none if undecided.

    Args:
        by_rank: hashes, a row for each rank and a column for each tensor.
    """
    size, odd = len(by_rank), set[int]()
    for column in np.flatnonzero((by_rank != by_rank[0]).any(axis=0)):
        values = by_rank[:, column].tolist()
        usual, votes = Counter(values).most_common(1)[0]
        if 2 * votes <= size:
            return []
        odd |= {rank for rank, value in enumerate(values) if value != usual}
    return sorted(odd) if len(odd) < size else []


def alike(column: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """Return ``ranks`` sorted into those that have equal values in ``column``."""
    groups: dict[int, list[int]] = {}
    for rank, value in zip(ranks, column, strict=True):
        groups.setdefault(value, []).append(rank)
    return list(groups.values())
