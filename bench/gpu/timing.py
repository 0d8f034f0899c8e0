"""Durations on a GPU, by its own events, on memory that its L2 cache does not hold."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

WARM_UP_TURNS = 3
_LEAST_CALLS = 4
_LONGEST_LEAD = 0.02
_CYCLES_PER_SECOND = 2e9  # no less than any GPU's clock: the lead may be too long, never too short


def num_copies(l2_bytes: int, bytes_per_call: int) -> int:
    """Return how many copies of its memory a call has to rotate over.

    Between two calls on the same copy, at least twice the cache has passed through it, and there are always two.
    """
    return 1 + max(1, math.ceil(2 * l2_bytes / max(1, bytes_per_call)))


class Turn:
    """Stopwatch for ``calls``, which do the same on different memory, one after the other; a call of it gives the mean.

    On a GPU the time is that between two events around all of them. The GPU is kept busy until the
    host has enqueued everything: what Python takes is not in the time, but in ``host_seconds``. On a
    CPU (in tests) it is the time on the clock.
    """

    def __init__(self, calls: Sequence[Callable[[], object]], device: torch.device) -> None:
        self._calls = [*calls] * -(-_LEAST_CALLS // len(calls))
        self._host: list[float] = []
        self._on_gpu = device.type == "cuda"
        self._lead = _LONGEST_LEAD
        if self._on_gpu:
            self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def warm_up(self) -> None:
        """Take turns that do not count: allocations, first launches, clocks."""
        for _ in range(WARM_UP_TURNS):
            self()
        self._host.clear()

    def __call__(self) -> float:
        """Take the turn; returns seconds per call."""
        if not self._on_gpu:
            return self._enqueue() / len(self._calls)
        torch.cuda._sleep(int(self._lead * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        self._start.record()
        host = self._enqueue()
        self._end.record()
        self._end.synchronize()
        self._lead = min(_LONGEST_LEAD, 2 * host + 1e-4)
        milliseconds: float = self._start.elapsed_time(self._end)
        return milliseconds / 1e3 / len(self._calls)

    @property
    def host_seconds(self) -> float:
        """Seconds that a call takes to return, the median so far."""
        return median(self._host)

    def _enqueue(self) -> float:
        begin = time.perf_counter()
        for call in self._calls:
            call()
        seconds = time.perf_counter() - begin
        self._host.append(seconds / len(self._calls))
        return seconds
