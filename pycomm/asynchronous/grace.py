"""Grace: for how long a merge waits for ranks beyond its quorum, by when they have come so far.

Ranks that have handed in what they did wait until it is merged. Whom a merge does not wait for waits for the next one.
So waiting for a rank costs the time of those that are there, and not waiting costs that rank's: of all ranks that may
still come, as many are waited for as make the least work go undone, counted in samples. Nothing is to be tuned. (A
quorum with a window of grace is from "Decoupled DiLoCo", 2026, arXiv:2604.21428; the rule is ours.)
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from statistics import mean

from pycomm.asynchronous.modes import Rules

_REMEMBERED = 32


@dataclass
class _Rank:
    """What is known of a rank.

    Attributes:
        since: when it began what it is doing.
        durations: how long it took lately, in seconds.
        samples: how many it has handed in after these.
    """

    since: float
    durations: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    @property
    def rate(self) -> float:
        """Samples a second; 0 if nothing is known."""
        total = sum(self.durations)
        return sum(self.samples) / total if total > 0 else 0.0

    def remaining(self, now: float) -> float:
        """Return for how long it will still take, on average of the times that it took longer than now; else inf."""
        taken = now - self.since
        longer = [duration for duration in self.durations if duration > taken]
        return mean(longer) - taken if longer else math.inf


class Arrivals:
    """Arrivals of ranks so far, in seconds of any clock."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def begin(self, rank: int, now: float) -> None:
        """Note that ``rank`` has begun to work."""
        self._ranks.setdefault(rank, _Rank(now)).since = now

    def arrive(self, rank: int, now: float, samples: float) -> None:
        """Note that ``rank`` hands in what it has done since it began."""
        known = self._ranks.setdefault(rank, _Rank(now))
        if now > known.since:
            known.durations.append(now - known.since)
            known.samples.append(samples)

    def forget(self, rank: int) -> None:
        """Forget ``rank``, which is gone."""
        self._ranks.pop(rank, None)

    def worth_waiting(self, here: Collection[int], quorum: int, now: float) -> float:
        """Return for how many seconds those that are ``here`` had better wait; 0 for not at all.

        Args:
            here: ranks that have handed in.
            quorum: number of ranks that the next merge will want.
            now: the time.
        """
        late = sorted(
            (known.remaining(now), rank)
            for rank, known in self._ranks.items()
            if rank not in here and known.remaining(now) < math.inf
        )
        least, best = self._undone([*here], late, 0.0, quorum), 0.0
        for count, (seconds, _) in enumerate(late, start=1):
            come = [rank for _, rank in late[:count]]
            undone = self._undone([*here, *come], late[count:], seconds, quorum)
            undone += sum(self._ranks[rank].rate * seconds for rank in here)
            undone += sum(self._ranks[rank].rate * (seconds - at) for at, rank in late[:count])
            if undone < least:
                least, best = undone, seconds
        return best

    def _undone(self, merged: list[int], late: list[tuple[float, int]], after: float, quorum: int) -> float:
        """Return what ``late`` ranks leave undone while they wait for the merge that follows the one ``after`` seconds.

        That one comes when as many as the quorum are there again, of those ``merged`` and those that are late.
        """
        again = [after + mean(self._ranks[rank].durations) for rank in merged if self._ranks[rank].durations]
        arrivals = sorted([*again, *(at for at, _ in late)])
        if len(arrivals) < quorum:
            return 0.0  # nothing is known of when that will be
        following = arrivals[quorum - 1]
        return sum(self._ranks[rank].rate * max(0.0, following - at) for at, rank in late)


class GraceQuorum(Rules):
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
