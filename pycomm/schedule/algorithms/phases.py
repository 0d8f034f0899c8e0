"""Phases of the algorithms on grids: what rows, or groups, do before and after the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pycomm.schedule.collective import Schedule

Phases = Mapping[str, tuple[Callable[[int], Schedule], Callable[[int], Schedule]]]
"""The first and the last phase, as functions of the number of ranks, by name."""


def phases(parameter: str, name: str, known: Phases, num_ranks: int) -> tuple[Schedule, Schedule]:
    """Make the first and the last phase called ``name`` among ``num_ranks`` ranks.

    Raises:
        ValueError: there is no such name; names the ``parameter``.
    """
    if name not in known:
        raise ValueError(f"{parameter} is {name!r}, wanted one of {', '.join(known)}")
    first, last = known[name]
    return first(num_ranks), last(num_ranks)
