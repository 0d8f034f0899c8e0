"""Builds tables from each rank's actions, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pycomm.schedule.pipeline.messages import messages_of, places_of
from pycomm.schedule.pipeline.progress import run
from pycomm.schedule.pipeline.table import (
    BACKWARD_INPUT,
    FORWARD,
    MOST_ACTIONS,
    MOST_RANKS,
    WEIGHTS,
    Action,
    Pipeline,
    columns_of,
    concatenated,
)
from pycomm.schedule.table import Ints, require_ranks

OLDEST = -1
"""Stage of a WEIGHTS action that completes the oldest BACKWARD_INPUT of this rank."""

Step = tuple[int, int]
"""Stage and kind of an action; its microbatch is the number of times the pair came before."""


def require_sizes(ranks: int, microbatches: int, stages_per_rank: int = 1) -> tuple[int, int]:
    """Return both numbers as ints.

    Raises:
        ValueError: one is less than 1 or no whole number, or the table would be too large.
    """
    ranks = require_ranks(ranks, "ranks")
    microbatches = require_ranks(microbatches, "microbatches")
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks is {ranks}, wanted at most {MOST_RANKS}")
    actions = 3 * ranks * stages_per_rank * microbatches
    if actions > MOST_ACTIONS:
        raise ValueError(
            f"{ranks} ranks with {stages_per_rank} stages each and {microbatches} microbatches make up to {actions} "
            f"actions, wanted at most {MOST_ACTIONS}"
        )
    return ranks, microbatches


def numbered(steps: Iterable[Step], num_microbatches: int) -> Iterator[Action]:
    """Yield the steps with their microbatches, which each stage takes in order; drop those beyond the last one.

    Args:
        steps: stage and kind of a rank's actions, in order, for at least ``num_microbatches``.
    """
    forwards: dict[int, int] = {}
    backwards: dict[int, int] = {}
    pending: deque[tuple[int, int]] = deque()
    for stage, kind in steps:
        if kind == WEIGHTS:
            if stage == OLDEST:
                at, microbatch = pending.popleft()
            else:
                at, microbatch = next(p for p in pending if p[0] == stage)
                pending.remove((at, microbatch))
        else:
            counts = forwards if kind == FORWARD else backwards
            at, microbatch = stage, counts.get(stage, 0)
            counts[stage] = microbatch + 1
            if kind == BACKWARD_INPUT:
                pending.append((stage, microbatch))
        if microbatch < num_microbatches:
            yield Action(at, kind, microbatch)


def built(
    name: str,
    rank_of_stage: Ints,
    num_microbatches: int,
    programs: Sequence[Iterable[Step]],
    splits_weights: bool = False,
) -> Pipeline:
    """Make a table of each rank's steps; the time of an action is its earliest slot.

    Each action takes one slot, a message none. :func:`numbered` adds the microbatches.
    """
    actions = [list(numbered(steps, num_microbatches)) for steps in programs]
    rank, stage, kind, microbatch = concatenated(actions)
    table = Pipeline(
        name=name,
        num_ranks=len(programs),
        num_stages=len(rank_of_stage),
        num_microbatches=num_microbatches,
        rank_of_stage=rank_of_stage,
        rank=rank,
        time=np.arange(len(rank)),
        stage=stage,
        kind=kind,
        microbatch=microbatch,
        splits_weights=splits_weights,
    )
    table.time[:] = _slots(table)
    for column in (rank_of_stage, table.rank, table.time, table.stage, table.kind, table.microbatch):
        column.setflags(write=False)
    return table


def _slots(table: Pipeline) -> Ints:
    """Return the earliest slot of each action of a table that is sorted by rank and time."""
    c = columns_of(table)
    messages = messages_of(c, places_of(c))
    awaited = np.full(len(c), -1, np.int64)
    awaited[messages.dst] = messages.src
    before, slot, rank = awaited.tolist(), [0] * len(c), c.rank.tolist()
    free = [0] * c.num_ranks
    for action in run(c, messages):
        at, needed = free[rank[action]], before[action]
        if needed >= 0 and slot[needed] >= at:
            at = slot[needed] + 1
        slot[action] = at
        free[rank[action]] = at + 1
    return np.array(slot, np.int64)
