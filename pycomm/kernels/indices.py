"""Ascending indices as bits. Contract: csrc/kernels/indices.h."""

from __future__ import annotations

from typing import Any

import pycomm._native as _native
from pycomm.kernels.arrays import Scratch, empty, look


def packed_words(limit: int, count: int) -> int:
    """Return how many int32 words ``count`` indices below ``limit`` take: about 2 + lg(limit / count) bits each."""
    return _native.packed_words(limit, count)


def pack_indices(indices: Any, limit: int, out: Any | None = None) -> Any:
    """Pack ascending int32 ``indices``, all below ``limit``, into ``packed_words(limit, len(indices))`` int32 words.

    The Elias-Fano code takes at most 3 bits per index more than lg(limit / count), whatever the indices
    are, so all ranks know the size beforehand.

    Raises:
        ValueError: there are no indices, or some do not ascend or are too large. On a GPU the call returns
            before that is known: a later call of any kernel raises the error, or this one if
            ``PYCOMM_SYNC=1`` is set. TypeError: not int32.
    """
    if out is None:
        out = empty(indices, (_native.packed_words(limit, look("indices", indices)[0]),), "int32")
    _native.pack_indices(indices, limit, out)
    return out


def unpack_indices(
    words: Any, limit: int, count: int, out: Any | None = None, *, scratch: Scratch | None = None
) -> Any:
    """Unpack what :func:`pack_indices` packed.

    Raises:
        ValueError: ``words`` are too few or too many, or do not hold ``count`` ascending indices; on a
            GPU as for :func:`pack_indices`.
    """
    if out is None:
        # Nothing is allocated for a count that does not match the words; the kernel refuses it.
        fits = look("words", words)[0] == _native.packed_words(limit, count)
        out = empty(words, (count if fits else 0,), "int32")
    _native.unpack_indices(words, limit, count, out, scratch)
    return out
