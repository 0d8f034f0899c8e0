"""Memory for the fuzz of the kernels: between guards, often before a page that nobody may touch, so that reads show."""

from __future__ import annotations

import ctypes
import mmap
import random
from typing import Any

import numpy as np

GUARD = 64
PATTERN = np.uint8(0xA5)
_CELL = 128 * 1024
_NUM_CELLS = 48
_PROT_NONE = 0


class Rng(random.Random):
    """Decides everything about one call."""

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def torch_seed(self) -> int:
        return self.getrandbits(31)


class Block:
    """Some memory of a call.

    Attributes:
        memory: bytes, guards and all. begin: where its arrays may begin. owner: the Python object whose memory it is.
    """

    def __init__(self, memory: np.ndarray, begin: int, owner: Any = None) -> None:
        self.memory = memory
        self.begin = begin
        self.owner = owner
        if owner is None:
            memory[:] = PATTERN

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    def snapshot(self) -> np.ndarray:
        return self.memory.copy()


class Fences:
    """Cells of memory, each before a page without access. Made once for a process, handed out anew for every call."""

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        self._map = mmap.mmap(-1, _NUM_CELLS * (_CELL + page) + page)
        whole = np.frombuffer(self._map, np.uint8)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._cells = []
        for cell in range(_NUM_CELLS):
            end = (cell + 1) * (_CELL + page)
            if protect(whole.ctypes.data + end - page, page, _PROT_NONE) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
            self._cells.append(whole[end - page - _CELL : end - page])
        self._next = 0

    def restart(self) -> None:
        self._next = 0

    def take(self, size: int) -> Block | None:
        """A block whose ``size`` bytes end where the fence begins; ``None`` if there is none left."""
        if self._next == len(self._cells) or size + GUARD > _CELL:
            return None
        cell = self._cells[self._next]
        self._next += 1
        return Block(cell[_CELL - size - GUARD :], GUARD)


_fences: Fences | None = None


def fences() -> Fences:
    global _fences
    if _fences is None:
        _fences = Fences()
    return _fences


def block_of(rng: Rng, size: int) -> Block:
    """A new block for ``size`` bytes, at a fence or between two guards."""
    at_a_fence = rng.chance(0.6)
    found = fences().take(size) if at_a_fence else None
    if found is not None:
        return found
    raw = np.empty(size + 2 * GUARD + 64, np.uint8)
    skipped = -raw.ctypes.data % 64  # addresses must not depend on the allocator's mood
    return Block(raw[skipped : skipped + size + 2 * GUARD], GUARD)


def owned_block(owner: Any) -> Block:
    """A Python object's own memory: no guards, but what is in it counts."""
    return Block(np.frombuffer(owner, np.uint8), 0, owner)
