"""Modes of a parameter server: which gradients make an update, and who has to wait for whom.

They know nothing of tensors or of connections: a server asks them, and tells them what it has done.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from pycomm.asynchronous.grace import Arrivals


class Mode(ABC):
    """Rules of one server.

    Attributes:
        workers: those that take part, by their numbers.
        num_collected: number of gradients that wait for an update.
    """

    def __init__(self) -> None:
        self.workers: set[int] = set()
        self.num_collected = 0

    def join(self, worker: int) -> None:
        """Note that ``worker`` takes part from now on."""
        self.workers.add(worker)

    def leave(self, worker: int) -> None:
        """Note that ``worker`` does not take part any more."""
        self.workers.discard(worker)

    def may_pull(self, worker: int) -> bool:
        """Return whether ``worker`` may have the parameters now, or has to wait."""
        return True

    def pulled(self, worker: int) -> None:
        """Note that ``worker`` has the parameters."""
        return

    def push(self, worker: int, staleness: int, samples: float) -> bool:
        """Return whether a gradient of ``worker`` counts, whose parameters are ``staleness`` updates old."""
        self.num_collected += 1
        return True

    def seconds_left(self) -> float:
        """Return for how long :meth:`is_due` stays as it is if nothing happens."""
        return math.inf

    @abstractmethod
    def is_due(self) -> bool:
        """Return whether what was collected makes an update now."""

    def updated(self) -> None:
        """Note that the update was made."""
        self.num_collected = 0

    def state(self) -> dict[str, Any]:
        """Return what a server that begins again has to know."""
        return {"collected": self.num_collected, "workers": sorted(self.workers)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self.num_collected, self.workers = state["collected"], set(state["workers"])


class Async(Mode):
    """Every gradient is an update, and nobody waits."""

    def is_due(self) -> bool:
        return self.num_collected > 0


class Softsync(Mode):
    """Every ``count`` gradients, of whichever workers, are an update by their mean (Zhang et al., 2016)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def is_due(self) -> bool:
        return self.num_collected >= self._count


class StaleSynchronous(Async):
    """Every gradient is an update; no worker is more than ``bound`` gradients ahead of another (Ho et al., 2013)."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self._bound = bound
        self._clocks: dict[int, int] = {}

    def join(self, worker: int) -> None:
        """Note that ``worker`` takes part from now on, as far as the slowest one is."""
        if worker not in self.workers:
            self._clocks[worker] = min((self._clocks[w] for w in self.workers), default=0)
        super().join(worker)

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._clocks.pop(worker, None)

    def may_pull(self, worker: int) -> bool:
        return self._clocks[worker] - min(self._clocks.values()) <= self._bound

    def push(self, worker: int, staleness: int, samples: float) -> bool:
        self._clocks[worker] += 1
        return super().push(worker, staleness, samples)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "clocks": dict(self._clocks)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._clocks = dict(state["clocks"])


class Sync(Mode):
    """One gradient of each worker is an update by their mean; all but ``backup`` of them suffice (Chen et al., 2016).

    Gradients of earlier parameters do not count.
    """

    def __init__(self, backup: int) -> None:
        super().__init__()
        self._backup = backup
        self._done: set[int] = set()

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._done.discard(worker)

    def may_pull(self, worker: int) -> bool:
        return worker not in self._done

    def push(self, worker: int, staleness: int, samples: float) -> bool:
        if staleness > 0:
            return False
        self._done.add(worker)
        return super().push(worker, staleness, samples)

    def is_due(self) -> bool:
        return self.num_collected >= max(1, len(self.workers) - self._backup)

    def updated(self) -> None:
        super().updated()
        self._done.clear()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "done": sorted(self._done)}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._done = set(state["done"])


class GraceQuorum(Mode):
    """Contributions of ``quorum`` workers are an update by their mean; and of others, if they are worth waiting for.

    Args:
        quorum: fewest workers; if there are fewer, all of them.
        clock: seconds.
    """

    def __init__(self, quorum: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._quorum, self._clock = quorum, clock
        self._here: set[int] = set()
        self._arrivals = Arrivals()

    def leave(self, worker: int) -> None:
        super().leave(worker)
        self._here.discard(worker)
        self._arrivals.forget(worker)

    def may_pull(self, worker: int) -> bool:
        return worker not in self._here

    def pulled(self, worker: int) -> None:
        self._arrivals.begin(worker, self._clock())

    def push(self, worker: int, staleness: int, samples: float) -> bool:
        self._here.add(worker)
        self._arrivals.arrive(worker, self._clock(), samples)
        return super().push(worker, staleness, samples)

    def is_due(self) -> bool:
        return self._is_enough() and self.seconds_left() == 0

    def seconds_left(self) -> float:
        if self.num_collected == 0 or not self._is_enough():
            return math.inf
        return self._arrivals.worth_waiting(self._here, self._quorum, self._clock())

    def _is_enough(self) -> bool:
        return len(self._here) >= min(self._quorum, len(self.workers))

    def updated(self) -> None:
        super().updated()
        self._here.clear()


MODES = ("async", "ssp", "softsync", "sync")


def mode_of(name: str, staleness: int | None, quorum: int | None, backup: int) -> Mode:
    """Return the mode called ``name``."""
    if name == "ssp":
        assert staleness is not None
        return StaleSynchronous(staleness)
    if name == "softsync":
        assert quorum is not None
        return Softsync(quorum)
    return Sync(backup) if name == "sync" else Async()
