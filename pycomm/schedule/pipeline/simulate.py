"""Simulation: the time that a pipeline's table takes, and how long its ranks idle.

The model. A rank does its actions in order, each as soon as the rank is free and the action's inputs are there. A
message between two ranks takes ``transfer`` seconds after its action; meanwhile the sender continues, and messages
do not delay each other. Any number of them may be unreceived. Tensors that skip stages are ignored: one that takes
no longer than the stages and transfers that it skips changes nothing.

With ``cores``, at most that many ranks compute at full speed. If more do, they share the cores evenly (processor
sharing, as by a kernel's scheduler in the long run). Ranks that wait use no core.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pycomm.schedule.pipeline.table import BACKWARD, BACKWARD_INPUT, FORWARD, WEIGHTS, Columns
from pycomm.schedule.pipeline.verify import Proof, verify
from pycomm.schedule.table import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """Simulated times of a table, in seconds, or in the unit of the given durations.

    Attributes:
        seconds: from the first action's start to the last one's end.
        busy: [num_ranks], the seconds that each rank computes (with ``cores``, also at reduced speed).
        idle: [num_ranks], the rest of ``seconds``.
        bubble: the fraction of all ranks' time in which they idle.
        peak_activations: [num_ranks], int64: the most activations that each rank holds at once, each of one
            microbatch at one stage, as counted by :func:`pycomm.schedule.pipeline.verify`.
        start, end: [actions], when each action of the table starts and ends.
    """

    seconds: float
    busy: Floats
    idle: Floats
    bubble: float
    peak_activations: Ints
    start: Floats
    end: Floats


def simulate(
    table: Any,
    forward: Any,
    backward: Any,
    weights: Any = 0.0,
    transfer: Any = 0.0,
    cores: int | None = None,
) -> Simulation:
    """Simulate how long ``table`` takes; durations are a number, or one for each stage.

    Args:
        forward: seconds of a stage's forward of a microbatch.
        backward: seconds of its backward. In a table that splits backwards: of the gradient of the input.
        weights: seconds of the gradient of the weights, in a table that splits backwards. A whole backward takes
            ``backward + weights`` in such a table, and ``backward`` in others, which do not use this.
        transfer: seconds of a message between ranks, in either direction; or one for each boundary between a
            stage and the next.
        cores: how many ranks can compute at once at full speed; ``None``: all.

    Raises:
        ScheduleError: ``table`` is wrong, see :func:`pycomm.schedule.pipeline.verify`.
        ValueError: a duration is negative or not finite, there are not as many as stages, or ``cores`` < 1.
    """
    if cores is not None and (not isinstance(cores, int | np.integer) or isinstance(cores, bool) or cores < 1):
        raise ValueError(f"cores is {cores!r}, wanted a whole number of at least 1, or None")
    proof = verify(table)
    c = proof.columns
    seconds = _durations(
        c,
        _per_stage(forward, "forward", c.num_stages, "stage"),
        _per_stage(backward, "backward", c.num_stages, "stage"),
        _per_stage(weights, "weights", c.num_stages, "stage"),
    )
    delay = _delays(proof, _per_stage(transfer, "transfer", c.num_stages - 1, "boundary"))
    if cores is None or cores >= c.num_ranks:
        start, end = _times(proof, seconds, delay)
    else:
        clock = _SharedClock(proof, seconds, delay, int(cores))
        clock.run()
        start, end = np.array(clock.start), np.array(clock.end)
    return _simulation(proof, start, end)


def _per_stage(value: Any, name: str, count: int, of: str) -> Floats:
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, wanted seconds, or seconds for each {of}") from None
    if array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        raise ValueError(f"{name} has the shape {list(array.shape)}, wanted a number, or one for each {of}: {count}")
    if not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(f"{name} is {value!r}, wanted seconds that are finite and not negative")
    return np.broadcast_to(array, count)


def _durations(c: Columns, forward: Floats, backward: Floats, weights: Floats) -> Floats:
    """Return how long each action takes."""
    by_kind = np.zeros((4, c.num_stages))
    by_kind[FORWARD], by_kind[BACKWARD_INPUT], by_kind[WEIGHTS] = forward, backward, weights
    by_kind[BACKWARD] = backward + weights if c.splits_weights else backward
    return np.asarray(by_kind[c.kind, c.stage])


def _delays(proof: Proof, transfer: Floats) -> Floats:
    """Return how long each message travels."""
    stage = proof.columns.stage
    boundary = np.minimum(stage[proof.messages.src], stage[proof.messages.dst])
    return np.asarray(transfer[boundary])


def _times(proof: Proof, seconds: Floats, delay: Floats) -> tuple[Floats, Floats]:
    """Return when each action starts and ends if every rank has a core."""
    count = len(proof.columns)
    awaited, travel = np.full(count, -1, np.int64), np.zeros(count)
    awaited[proof.messages.dst], travel[proof.messages.dst] = proof.messages.src, delay
    needs, late, duration = awaited.tolist(), travel.tolist(), seconds.tolist()
    rank = proof.columns.rank.tolist()
    free = [0.0] * proof.columns.num_ranks
    start, end = [0.0] * count, [0.0] * count
    for action in proof.order:
        at, needed = free[rank[action]], needs[action]
        if needed >= 0:
            at = max(at, end[needed] + late[action])
        start[action] = at
        free[rank[action]] = end[action] = at + duration[action]
    return np.array(start), np.array(end)


def _simulation(proof: Proof, start: Floats, end: Floats) -> Simulation:
    c = proof.columns
    seconds = float(end.max() - start.min())
    busy = np.zeros(c.num_ranks)
    np.add.at(busy, c.rank, end - start)
    in_table_start, in_table_end = np.empty_like(start), np.empty_like(end)
    in_table_start[c.order], in_table_end[c.order] = start, end
    return Simulation(
        seconds=seconds,
        busy=busy,
        idle=seconds - busy,
        bubble=float(1 - busy.sum() / (seconds * c.num_ranks)) if seconds > 0 else 0.0,
        peak_activations=proof.peak_activations,
        start=in_table_start,
        end=in_table_end,
    )


class _SharedClock:
    """Clock of ranks that share cores, in seconds and in work.

    All ranks that compute run at the same speed: 1, or cores / ranks that compute if that is less. So one clock that
    runs at this speed measures everybody's work: an action that starts at its time v ends at its time v + seconds.
    Events are the ends of actions, on that clock, and arrivals of messages, in seconds; the sooner one is next.

    Args:
        seconds: [actions], of each action at full speed. delay: [messages], from the sender's end to the arrival.
    """

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
        self._traveling: list[tuple[float, int]] = []  # when it arrives, action that needs it

    def run(self) -> None:
        for rank in range(len(self._next)):
            self._begin(rank)
        while self._computing or self._traveling:
            speed = min(1.0, self._cores / max(1, len(self._computing)))
            done = self._now + (self._computing[0][0] - self._work) / speed if self._computing else np.inf
            if self._traveling and self._traveling[0][0] <= done:
                arrives, action = heapq.heappop(self._traveling)
                self._work += (arrives - self._now) * speed
                self._now = arrives
                self._arrive(action)
            else:
                self._work, action = heapq.heappop(self._computing)
                self._now = max(self._now, float(done))  # rounding may have made it smaller
                self._finish(action)

    def _begin(self, rank: int) -> None:
        """Let ``rank`` start its next action, if it is free and has the action's inputs."""
        action = self._next[rank]
        if self._idle[rank] and action < self._last[rank] and not self._missing[action]:
            self._idle[rank] = False
            self.start[action] = self._now
            heapq.heappush(self._computing, (self._work + self._seconds[action], action))

    def _finish(self, action: int) -> None:
        self.end[action] = self._now
        for needed_by, late in self._sends[action]:
            if late > 0:
                heapq.heappush(self._traveling, (self._now + late, needed_by))
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
