"""Durations, measured in turns; they are summed up and written as by ``pycomm bench``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pycomm.tools.cli.timing import Samples, duration, times

__all__ = ["Samples", "duration", "interleave", "stopwatch", "times"]


def stopwatch(call: Callable[[], object]) -> float:
    """Return how long one ``call`` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleave(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Samples]:
    """Let every case, a function that returns its own duration, have one turn per round.

    What disturbs the machine for a while (a neighbor, a changed clock) then hits all cases equally,
    and ratios between them stay right. Every other round runs backwards, so that no case always
    finds the caches as the same other one left them.
    """
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in list(cases) if number % 2 == 0 else reversed(list(cases)):
            taken[name].append(cases[name]())
    return {name: Samples.of(seconds) for name, seconds in taken.items()}
