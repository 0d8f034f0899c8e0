"""Pieces that differ in length by at most one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

T = TypeVar("T")


def lengths(count: int, parts: int) -> list[int]:
    """Return the lengths of ``parts`` pieces of ``count`` things: the first ones have one more."""
    return [count // parts + (i < count % parts) for i in range(parts)]


def pieces(values: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return ``values`` in ``parts`` pieces, in order; with more pieces than values the last ones are empty."""
    return [values[a:b] for a, b in pairwise(accumulate(lengths(len(values), parts), initial=0))]
