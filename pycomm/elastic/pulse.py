"""Pulse: how ranks of several hosts show one another that they are alive, although they may be busy.

A rank that finds an operation failed calls the others through the ledger. One that computes does not hear that until
its next operation; but a thread of its own looks for calls now and then, and answers. Who does not answer
has died, is stopped or cannot be reached.
"""

from __future__ import annotations

import threading

from pycomm import threads
from pycomm.torch_internals import PrefixStore, Store

PATIENCE = 3.0
"""Seconds after which a rank that does not answer a call is left behind."""

_INTERVAL = 0.25  # seconds between two looks, for a few ranks
_LOOKS_PER_SECOND = 500.0  # of all ranks together, which one store can well answer


class Pulse:
    """Thread of rank ``me``, one of ``size``, that answers calls in ``store``."""

    def __init__(self, store: Store, me: int, size: int) -> None:
        self._store, self._me = store, me
        self._interval = max(_INTERVAL, size / _LOOKS_PER_SECOND)
        self.patience = PATIENCE + 2 * self._interval
        self._round = 1
        self._stopped = threading.Event()
        threads.start(self._run, f"pycomm-pulse-{me}", self.stop)

    def expect(self, number: int) -> None:
        """Look for calls of the round with that number from now on."""
        self._round = number

    def stop(self) -> None:
        """Answer no more."""
        self._stopped.set()

    def _run(self) -> None:
        answered = 0
        while not self._stopped.wait(self._interval):
            number = self._round
            if number == answered:
                continue
            try:
                if is_called(self._store, number):
                    round_store(self._store, number).set(f"alive/{self._me}", "")
                    answered = number
            except RuntimeError:  # the store has gone
                return


def round_store(store: Store, number: int) -> PrefixStore:
    """Return the part of the ledger that belongs to a round of the agreement."""
    return PrefixStore(f"round/{number}", store)


def is_called(store: Store, number: int) -> bool:
    """Return whether a rank has called the others to that round."""
    return bool(round_store(store, number).check(["called"]))
