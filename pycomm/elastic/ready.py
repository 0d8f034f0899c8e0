"""Which ranks are ready: times on a page of memory of one host, or a count in the store in which the ranks agree."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np

from pycomm.communicator import Communicator
from pycomm.elastic.agreement_store import AgreementStore, shared_file
from pycomm.torch_internals import PrefixStore

_TIME_BITS = 48  # microseconds, for nine years; the rest of a word numbers the event
_SLOTS = 2
"""A rank that has come to the next event has not written over this one: all must end it to get further."""


class ReadyPage:
    """Memory that all ranks of one host read, where each writes when it has come to an event.

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
        """Return the times at which ranks came to ``event``, in seconds of a shared clock, for those that have."""
        words = self._words[:, event % _SLOTS].tolist()
        number, mask = _number(event), (1 << _TIME_BITS) - 1
        return {rank: (word & mask) * 1e-6 for rank, word in enumerate(words) if word >> _TIME_BITS == number}


def _number(event: int) -> int:
    return event % 0x7FFF + 1  # positive, and not the 0 of a page on which nobody has written


_REMEMBERED = 2  # steps, before which nobody asks about one any more


class ReadyCount:
    """Counts the ranks that are ready, step by step: on a page of one host, else in the store."""

    def __init__(self, agreement: AgreementStore, name: str, page: ReadyPage | None) -> None:
        self._agreement, self._page = agreement, page
        self._store = PrefixStore(f"ready/{name}", agreement.store)

    def answer(self, step: int) -> None:
        """Note that this rank is ready in ``step``.

        Raises:
            CommError: the store does not answer.
        """
        if self._page is not None:
            self._page.write(step)
            return
        self._agreement.ask(lambda: self._store.add(str(step), 1))
        self._agreement.ask(lambda: self._store.delete_key(str(step - _REMEMBERED)))

    def num_ready(self, step: int) -> int:
        """Return the number of ranks that are ready in ``step``. Raises as :meth:`answer` does."""
        if self._page is not None:
            return len(self._page.read(step))
        return self._agreement.ask(lambda: self._store.add(str(step), 0))


def open_ready_count(communicator: Communicator, agreement: AgreementStore, name: str) -> ReadyCount:
    """Return the count of the ranks of ``communicator``, under a ``name`` that is used once. Collective."""
    file = -1
    if communicator.transport == "shared_memory" and communicator.size > 1:
        file = shared_file(communicator, "pycomm-ready", "who is ready is counted in the process group's store")
    return ReadyCount(agreement, name, None if file < 0 else ReadyPage(file, communicator.rank, communicator.size))
