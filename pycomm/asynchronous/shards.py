"""Shards: which server holds which part of the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """Part of a parameter that one server holds: elements ``begin`` to ``end`` of parameter ``index``."""

    index: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.end - self.begin


def shard_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which servers hold and step parameters of ``dtype``: float32 for half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cut(sizes: Sequence[int], num_shards: int, *, anywhere: bool) -> list[list[Piece]]:
    """Return the pieces of each shard, in order; parameters have ``sizes`` elements.

    Args:
        anywhere: whether a cut may go through a parameter, as it may where each element is updated by itself. Otherwise
            it is at the border of two parameters that is nearest.
    """
    ends = list(itertools.accumulate(sizes))
    total = ends[-1] if ends else 0
    cuts = [total * k // num_shards for k in range(num_shards + 1)]
    if not anywhere:
        borders = [0, *ends]
        cuts = [0, *(min(borders, key=lambda b: abs(b - cut)) for cut in cuts[1:-1]), total]
    shards: list[list[Piece]] = []
    for first, last in itertools.pairwise(cuts):
        pieces = []
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            begin = end - size
            low, high = max(first, begin), min(last, end)
            if low < high:
                pieces.append(Piece(index, low - begin, high - begin))
        shards.append(pieces)
    return shards
