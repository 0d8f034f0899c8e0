"""Watch over operations that do not come to their end: it says in the log which, and for whom they wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from pycomm import threads
from pycomm.horovod.coordinator import full_name
from pycomm.horovod.requests import Key, Request

_PATIENCE = 5.0  # seconds

_LOG = logging.getLogger("pycomm")


class StallWatch:
    """Watch that names operations once they have been outstanding for long; each of them once.

    It has a thread of its own while anything is outstanding, as all others may be inside a round, which ends when the
    last rank has come.

    Args:
        after: seconds after which an operation has stalled; 0: nobody watches.
        rank, size: of this process in the set, and how many there are.
        outstanding: returns the requests that are not done.
        waiting: returns the ranks that operations wait for, of those that all ranks have heard of.
    """

    def __init__(
        self,
        after: float,
        rank: int,
        size: int,
        outstanding: Callable[[], Collection[Request]],
        waiting: Callable[[], dict[Key, list[int]]],
    ) -> None:
        self._after, self._rank = after, rank
        self._others = [other for other in range(size) if other != rank]
        self._outstanding, self._waiting = outstanding, waiting
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._named: set[Request] = set()

    def begin(self) -> None:
        """Watch, now that something is outstanding."""
        if self._after <= 0:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threads.start(self._watch, "pycomm-horovod-stalls", self._closing.set)

    def close(self) -> None:
        """Watch no more, and wait for the thread. Idempotent."""
        self._closing.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_PATIENCE)

    def _watch(self) -> None:
        while True:
            with self._lock:
                requests = self._outstanding()
                if not requests or self._closing.is_set():
                    self._thread = None
                    return
            self._named &= set(requests)
            now = time.monotonic()
            stalled = [request for request in requests if now - request.since >= self._after]
            if not self._named.issuperset(stalled):
                self._named.update(stalled)
                self._name(stalled, now)
            ends = [request.since + self._after for request in requests if request not in self._named]
            self._closing.wait(min(ends, default=now + self._after) - now)

    def _name(self, stalled: Sequence[Request], now: float) -> None:
        known = self._waiting()
        lines = [f"{full_name(request.key)} waits for {self._whom(known.get(request.key))}" for request in stalled]
        longest = max(now - request.since for request in stalled)
        _LOG.warning("Horovod operations have stalled for %.0f s on rank %d: %s", longest, self._rank, "; ".join(lines))

    def _whom(self, ranks: Sequence[int] | None) -> str:
        if ranks:
            return f"rank {', '.join(map(str, ranks))}"
        names = ", ".join(map(str, self._others))
        some = "" if len(self._others) == 1 else "one or more of "
        return f"{some}rank {names}, to come and say what it asks for: it asks for nothing, is in other code, or hangs"
