"""Ranks that share cores: the simulation of a pipeline on fewer cores than ranks.

All ranks that compute go at the same speed, 1 or cores / ranks that compute, so their work is measured by one
clock that runs at that speed: an action that starts at its time v ends at its time v + seconds. Events are the
ends of actions, on that clock, and arrivals of messages, in seconds; the sooner one is next.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from pycomm.schedule.pipeline.verify import Proof

Floats = npt.NDArray[np.float64]


def shared_times(proof: Proof, seconds: Floats, delay: Floats, cores: int) -> tuple[Floats, Floats]:
    """Return when each action starts and ends.

    Args:
        seconds: [actions], of each action at full speed. delay: [messages], from the sender's end to the arrival.
    """
    clock = _SharedClock(proof, seconds, delay, cores)
    clock.run()
    return np.array(clock.start), np.array(clock.end)


class _SharedClock:
    """Clock of all ranks, in seconds and in work."""

    def __init__(self, proof: Proof, seconds: Floats, delay: Floats, cores: int) -> None:
        c = proof.columns
        self._cores = cores
        self._seconds = seconds.tolist()
        self._rank = c.rank.tolist()
        self._next, self._last = c.first[:-1].tolist(), c.first[1:].tolist()
        self._idle = [True] * c.num_ranks
        self._missing = [0] * len(c)  # how many messages each action waits for
        self._sends: list[list[tuple[int, float]]] = [[] for _ in range(len(c))]
        columns = (proof.messages.src, proof.messages.dst, delay)
        for src, dst, late in zip(*(column.tolist() for column in columns), strict=True):
            self._sends[src].append((dst, late))
            self._missing[dst] += 1
        self.start, self.end = [0.0] * len(c), [0.0] * len(c)
        self._now = self._work = 0.0
        self._computing: list[tuple[float, int]] = []  # when its work is done, action
        self._travelling: list[tuple[float, int]] = []  # when it arrives, action that needs it

    def run(self) -> None:
        for rank in range(len(self._next)):
            self._begin(rank)
        while self._computing or self._travelling:
            speed = min(1.0, self._cores / max(1, len(self._computing)))
            done = self._now + (self._computing[0][0] - self._work) / speed if self._computing else np.inf
            if self._travelling and self._travelling[0][0] <= done:
                arrives, action = heapq.heappop(self._travelling)
                self._work += (arrives - self._now) * speed
                self._now = arrives
                self._arrive(action)
            else:
                self._work, action = heapq.heappop(self._computing)
                self._now = max(self._now, float(done))  # which rounding may have put before
                self._finish(action)

    def _begin(self, rank: int) -> None:
        """Let ``rank`` start its next action, if it is free and has all that this needs."""
        action = self._next[rank]
        if self._idle[rank] and action < self._last[rank] and not self._missing[action]:
            self._idle[rank] = False
            self.start[action] = self._now
            heapq.heappush(self._computing, (self._work + self._seconds[action], action))

    def _finish(self, action: int) -> None:
        self.end[action] = self._now
        for needed_by, late in self._sends[action]:
            if late > 0:
                heapq.heappush(self._travelling, (self._now + late, needed_by))
            else:
                self._arrive(needed_by)
        rank = self._rank[action]
        self._idle[rank] = True
        self._next[rank] += 1
        self._begin(rank)

    def _arrive(self, action: int) -> None:
        self._missing[action] -= 1
        if self._next[self._rank[action]] == action:
            self._begin(self._rank[action])
