"""Board: a page of memory on which the ranks of one host note when they have come to something that all come to."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np

_TIME_BITS = 48  # microseconds, for nine years; the rest of a word numbers the event
_SLOTS = 2
"""A rank that has come to the next event has not written over this one: all must end it to get further."""


class Board:
    """Board of the ranks of one host: memory that all of them read, where each writes when it has come.

    Args:
        file: descriptor of the memory, which is closed.
        rank, size: this one, and how many may write.
    """

    def __init__(self, file: int, rank: int, size: int) -> None:
        self._rank, self.size = rank, size
        num_bytes = size * _SLOTS * 8
        try:
            os.ftruncate(file, num_bytes)  # by all, to the same size
            memory = mmap.mmap(file, num_bytes)
        finally:
            os.close(file)
        # A word at a time is written, and read, as a whole.
        self._words = np.frombuffer(memory, np.int64).reshape(size, _SLOTS)

    def write(self, event: int) -> None:
        """Write that this rank has come to ``event``."""
        word = _number(event) << _TIME_BITS | time.monotonic_ns() // 1000
        self._words[self._rank, event % _SLOTS] = word

    def read(self, event: int) -> dict[int, float]:
        """Return when ranks have come to ``event``, in seconds of a clock that all share; those that have."""
        words = self._words[:, event % _SLOTS].tolist()
        number, mask = _number(event), (1 << _TIME_BITS) - 1
        return {rank: (word & mask) * 1e-6 for rank, word in enumerate(words) if word >> _TIME_BITS == number}


def _number(event: int) -> int:
    return event % 0x7FFF + 1  # positive, and not the 0 of a board on which nobody has written
