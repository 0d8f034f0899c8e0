"""Tables of actions: what pipelines are made of.

A model is cut into ``num_stages`` stages, each on one rank, and a batch into ``num_microbatches`` microbatches. An
*action* is one piece of a rank's work: a stage's forward of a microbatch, or its backward. A table may split
backwards into two actions: the gradient of the stage's input, which the previous stage waits for, and the gradient
of its weights, which no rank waits for (Qi et al., "Zero bubble pipeline parallelism", 2023, section 2).

A table is the actions of all ranks, as columns. A rank does its actions in the order of their times, each as soon
as it can: times only give the order. Messages are not in the table, since they follow from it: see
:func:`pycomm.schedule.pipeline.verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pycomm.schedule.table import Ints
from pycomm.schedule.verify import ScheduleError, integers, size_of, told

FORWARD = 0
BACKWARD = 1
"""Whole backward: of the input and of the weights."""
BACKWARD_INPUT = 2
WEIGHTS = 3

LETTERS = "FBIW"
"""torch's letter of each kind of action."""
KINDS = ("forward", "backward", "input gradient", "weight gradient")
"""Names of the kinds of action in errors."""

MOST_ACTIONS = 1 << 24
"""Tables with more actions are refused: their verification would take minutes and gigabytes."""
MOST_RANKS = 1 << 16


class Action(NamedTuple):
    """Piece of a rank's work: ``kind`` is FORWARD, BACKWARD, BACKWARD_INPUT or WEIGHTS."""

    stage: int
    kind: int
    microbatch: int

    def __str__(self) -> str:
        kind = KINDS[self.kind] if 0 <= self.kind < len(KINDS) else f"kind {self.kind}"
        return f"{kind} {self.microbatch} of stage {self.stage}"

    @property
    def cell(self) -> str:
        """The action as torch writes it: "2F0" is the forward of microbatch 0 of stage 2."""
        return f"{self.stage}{LETTERS[self.kind]}{self.microbatch}"


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline:
    """Pipeline as a table. Nothing is checked until it is used, so that wrong tables can be made and refused.

    Attributes:
        name: the algorithm's name, with its parameters.
        rank_of_stage: [num_stages], the rank of each stage.
        rank, time, stage, kind, microbatch: int64 columns, an entry per action. Times order the actions of a
            rank, and are distinct; in generated tables they count slots, and every action takes one.
        splits_weights: whether a backward may be split into BACKWARD_INPUT and WEIGHTS.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of_stage: Ints
    rank: Ints
    time: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    splits_weights: bool = False

    def program(self, rank: int) -> list[Action]:
        """Return what ``rank`` does, in order."""
        mine = np.flatnonzero(self.rank == rank)
        mine = mine[np.argsort(self.time[mine], kind="stable")]
        columns = (self.stage[mine], self.kind[mine], self.microbatch[mine])
        return [Action(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]

    def __len__(self) -> int:
        """Return the number of actions of all ranks."""
        return len(self.rank)

    def __repr__(self) -> str:
        return (
            f"<pipeline {self.name}: {self.num_stages} stages on {self.num_ranks} ranks, "
            f"{self.num_microbatches} microbatches, {len(self)} actions>"
        )


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of a table, checked: integers in range, sorted by rank and time.

    Attributes:
        first: [num_ranks + 1], where the actions of each rank begin.
        order: for each action here, its place in the table.
    """

    num_ranks: int
    num_stages: int
    num_microbatches: int
    rank_of_stage: Ints
    rank: Ints
    time: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    splits_weights: bool
    first: Ints
    order: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def action(self, index: int) -> Action:
        return Action(int(self.stage[index]), int(self.kind[index]), int(self.microbatch[index]))

    def named(self, index: int) -> str:
        """Return rank, index among the rank's actions, and action, for errors."""
        rank = int(self.rank[index])
        return f"rank {rank}, action {index - int(self.first[rank])} ({self.action(index)})"


def columns_of(table: Any) -> Columns:
    """Read a table: a :class:`Pipeline`, or anything with its attributes.

    Raises:
        ScheduleError: it is no table, a number in it is out of range, or a rank has two actions at one time.
    """
    try:
        return _columns_of(table)
    except ScheduleError:
        raise
    except Exception as error:  # strange objects, and sizes, may raise anything
        raise ScheduleError(f"this is not a table of a pipeline: {told(error)}") from None


def _columns_of(table: Any) -> Columns:
    names = ("num_ranks", "num_stages", "num_microbatches")
    num_ranks, num_stages, num_microbatches = (size_of(table, name) for name in names)
    rank, time, stage, kind, microbatch = (
        integers(getattr(table, name), name) for name in ("rank", "time", "stage", "kind", "microbatch")
    )
    lengths = [len(column) for column in (rank, time, stage, kind, microbatch)]
    if len(set(lengths)) > 1:
        raise ScheduleError(f"the columns have lengths {lengths}, wanted equal ones")
    if lengths[0] > MOST_ACTIONS:
        raise ScheduleError(f"there are {lengths[0]} actions, wanted at most {MOST_ACTIONS}")
    if num_ranks > MOST_RANKS:
        raise ScheduleError(f"num_ranks is {num_ranks}, wanted at most {MOST_RANKS}")
    placement = integers(table.rank_of_stage, "rank_of_stage")
    if len(placement) != num_stages or ((placement < 0) | (placement >= num_ranks)).any():
        raise ScheduleError(f"rank_of_stage is {placement}, wanted one of the {num_ranks} ranks for each stage")
    splits = table.splits_weights
    if not isinstance(splits, bool | np.bool_):
        raise ScheduleError(f"splits_weights is {splits!r}, wanted True or False")
    order = np.lexsort((time, rank))
    columns = Columns(
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        rank_of_stage=placement,
        rank=rank[order],
        time=time[order],
        stage=stage[order],
        kind=kind[order],
        microbatch=microbatch[order],
        splits_weights=bool(splits),
        first=np.searchsorted(rank[order], np.arange(num_ranks + 1)),
        order=order,
    )
    _require_range(columns)
    return columns


def _require_range(c: Columns) -> None:
    limits = (
        ("rank", c.rank, c.num_ranks),
        ("stage", c.stage, c.num_stages),
        ("kind", c.kind, len(KINDS)),
        ("microbatch", c.microbatch, c.num_microbatches),
    )
    for name, column, limit in limits:
        wrong = np.flatnonzero((column < 0) | (column >= limit))
        if len(wrong):
            at = int(wrong[0])
            raise ScheduleError(
                f"rank {c.rank[at]} at time {c.time[at]} ({c.action(at)}): {name} is not in 0 ... {limit - 1}"
            )
    same = np.flatnonzero((c.rank[1:] == c.rank[:-1]) & (c.time[1:] == c.time[:-1]))
    if len(same):
        at = int(same[0])
        raise ScheduleError(f"{c.named(at)}: at its time, {c.time[at]}, is also {c.action(at + 1)}")


def loop(num_ranks: int, stages_per_rank: int = 1) -> Ints:
    """Return the ``rank_of_stage`` that goes around the ranks: 0, 1, 2, 0, 1, 2."""
    return np.tile(np.arange(num_ranks, dtype=np.int64), stages_per_rank)


def vee(num_ranks: int) -> Ints:
    """Return the ``rank_of_stage`` of two stages per rank that goes there and back: 0, 1, 2, 2, 1, 0."""
    there = np.arange(num_ranks, dtype=np.int64)
    return np.concatenate([there, there[::-1]])


def concatenated(programs: Sequence[Sequence[Action]]) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the columns rank, stage, kind and microbatch of every rank's actions, one rank after the other."""
    flat = np.array([action for program in programs for action in program], np.int64).reshape(-1, 3)
    rank = np.repeat(np.arange(len(programs)), [len(program) for program in programs])
    return rank, flat[:, 0], flat[:, 1], flat[:, 2]
