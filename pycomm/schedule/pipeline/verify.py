"""Proof that a pipeline's table trains: every action happens once, in a valid order, and all ranks finish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pycomm.schedule.pipeline.messages import (
    MessagePlaces,
    Messages,
    Skips,
    edges_of,
    messages_of,
    places_of,
    require_skips,
)
from pycomm.schedule.pipeline.progress import UNLIMITED, run
from pycomm.schedule.pipeline.table import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    KINDS,
    WEIGHTS,
    Action,
    Columns,
    columns_of,
)
from pycomm.schedule.table import Ints
from pycomm.schedule.verify import ScheduleError


@dataclass(frozen=True, eq=False)
class Proof:
    """Result of verifying a table.

    Attributes:
        num_actions: of all ranks.
        num_messages: between all ranks.
        peak_activations: [num_ranks], the most activations that a rank holds at once, one for each microbatch and
            stage. They are held from the forward to the end of the backward, weights included.
        columns, messages, places: the table as read. order: an order in which its actions can be done.
    """

    num_actions: int
    num_messages: int
    peak_activations: Ints
    columns: Columns = field(repr=False)
    places: MessagePlaces = field(repr=False)
    messages: Messages = field(repr=False)
    order: list[int] = field(repr=False)

    def peak_memory(self, sizes: Any) -> Any:
        """Return the most that each rank holds at once, [num_ranks], in the unit of ``sizes``.

        Args:
            sizes: [num_stages], size of the activations that the forward of one microbatch leaves at each stage.

        Raises:
            ValueError: there are not as many sizes as stages, or one is negative or not finite.
        """
        array = np.asarray(sizes)
        if array.shape != (self.columns.num_stages,) or array.dtype.kind not in "iuf":
            raise ValueError(f"sizes is {sizes!r}, wanted a number for each of the {self.columns.num_stages} stages")
        if not (np.isfinite(array) & (array >= 0)).all():
            raise ValueError(f"sizes is {sizes!r}, wanted numbers that are finite and not negative")
        return peaks(self.columns, self.places, array)


def verify(table: Any, buffers: int | None = None, skips: Any = ()) -> Proof:
    """Raise ScheduleError unless the table is right; return the proof.

    In a right table the forward, backward and weights of every stage and microbatch are done exactly once, on the
    stage's rank, after everything they need, and all ranks finish. :mod:`pycomm.schedule.pipeline.progress` explains
    how messages are exchanged.

    Args:
        table: a :class:`pycomm.schedule.pipeline.Pipeline`, or anything with its attributes.
        buffers: how many messages from one rank to another may be unreceived before the sender has to wait;
            ``None``: any number, 0: every sender waits for its receiver.
        skips: pairs (producer stage, consumer stage) of tensors that skip stages.

    Raises:
        ScheduleError: the table is wrong. The message names rank, action, stage and microbatch or, for a
            deadlock, which ranks wait for what.
        ValueError: ``buffers`` is negative, or no whole number.
    """
    if buffers is not None and (not isinstance(buffers, int | np.integer) or isinstance(buffers, bool) or buffers < 0):
        raise ValueError(f"buffers is {buffers!r}, wanted a whole number of at least 0, or None")
    c = columns_of(table)
    pairs = require_skips(skips, c.num_stages)
    _require_home(c)
    _require_once(c)
    places = places_of(c)
    _require_order(c, places, pairs)
    messages = messages_of(c, places, pairs)
    order = run(c, messages, UNLIMITED if buffers is None else int(buffers))
    return Proof(len(c), len(messages.src), peaks(c, places), c, places, messages, order)


def _require_home(c: Columns) -> None:
    away = np.flatnonzero(c.rank != c.rank_of_stage[c.stage])
    if len(away):
        at = int(away[0])
        raise ScheduleError(f"{c.named(at)}: the stage is rank {c.rank_of_stage[c.stage[at]]}'s")


def _require_once(c: Columns) -> None:
    """Raise unless each stage and microbatch has one forward, and one backward, whole or in its two parts."""
    if not c.splits_weights:
        parts = np.flatnonzero(c.kind > BACKWARD)
        if len(parts):
            raise ScheduleError(f"{c.named(int(parts[0]))}: this table says that it does not split backwards")
    if len(c) < 2 * c.num_stages * c.num_microbatches:  # before anything of that size is allocated
        _fail_missing(c)
    cells = c.num_stages * c.num_microbatches
    cell = c.stage * c.num_microbatches + c.microbatch
    count = [np.bincount(cell[c.kind == kind], minlength=cells) for kind in range(len(KINDS))]
    backward, weights = count[BACKWARD] + count[BACKWARD_INPUT], count[BACKWARD] + count[WEIGHTS]
    for many, kinds in ((count[FORWARD], (FORWARD,)), (backward, (BACKWARD, BACKWARD_INPUT)), (weights, (1, WEIGHTS))):
        if (many > 1).any():
            _fail_twice(c, cell, int(np.argmax(many > 1)), kinds)
    for many, kind in ((count[FORWARD], FORWARD), (backward, BACKWARD), (weights, WEIGHTS)):
        if (many < 1).any():
            first = int(np.argmin(many))
            stage, microbatch = divmod(first, c.num_microbatches)
            if kind == BACKWARD and weights[first]:  # its other part is there
                kind = BACKWARD_INPUT
            raise ScheduleError(
                f"{Action(stage, kind, microbatch)} is missing: rank {c.rank_of_stage[stage]} never does it"
            )


def _fail_missing(c: Columns) -> None:
    """Raise for the first missing forward or backward, without allocating an array of all of them."""
    wanted = c.num_stages * c.num_microbatches
    for kind, kinds in ((FORWARD, (FORWARD,)), (BACKWARD, (BACKWARD, BACKWARD_INPUT))):
        found = np.flatnonzero(np.isin(c.kind, kinds))
        pairs = set(zip(c.stage[found].tolist(), c.microbatch[found].tolist(), strict=True))
        if len(pairs) == wanted:
            continue
        missing = next((s, m) for s in range(c.num_stages) for m in range(c.num_microbatches) if (s, m) not in pairs)
        stage, microbatch = missing
        raise ScheduleError(
            f"{Action(stage, kind, microbatch)} is missing: rank {c.rank_of_stage[stage]} never does it; "
            f"{c.num_stages} stages x {c.num_microbatches} microbatches need {wanted} of that kind"
        )


def _fail_twice(c: Columns, cell: Ints, wrong: int, kinds: tuple[int, ...]) -> None:
    again = np.flatnonzero((cell == wrong) & np.isin(c.kind, kinds))
    raise ScheduleError(f"{c.named(int(again[1]))}: done a second time, after {c.named(int(again[0]))}")


def _require_order(c: Columns, places: MessagePlaces, skips: Skips) -> None:
    """Raise unless on each rank an action comes after the actions of the same rank that it needs."""
    _refuse(c, places.backward < places.forward, places.backward, places.forward)
    _refuse(c, places.weights < places.backward, places.weights, places.backward)
    for producer, consumer in edges_of(c.num_stages, skips):
        if c.rank_of_stage[producer] == c.rank_of_stage[consumer]:
            first, then = places.forward[producer], places.forward[consumer]
            _refuse(c, then < first, then, first)
            first, then = places.backward[consumer], places.backward[producer]
            _refuse(c, then < first, then, first)


def _refuse(c: Columns, wrong: npt.NDArray[np.bool_], early: Ints, late: Ints) -> None:
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ScheduleError(
            f"{c.named(int(early.flat[at]))}: comes before {c.action(int(late.flat[at]))}, which it needs"
        )


def peaks(c: Columns, places: MessagePlaces, sizes: Any = None) -> Ints:
    """Return the most that each rank holds at once: [num_ranks].

    The forward of a stage leaves activations of its microbatch for the backward. They are freed after the whole
    backward or, where it is split, after the gradient of the weights. (An implementation could free some of them
    after the gradient of the input; that is not counted.) A rank does its actions one by one, in order, so its
    peak does not depend on how long they take.

    Args:
        sizes: [num_stages], what a microbatch leaves at each stage, in any unit; ``None``: 1.
    """
    change = np.zeros(len(c), np.int64)
    change[places.forward.ravel()] += 1
    change[places.weights.ravel()] -= 1
    held: npt.NDArray[Any] = change if sizes is None else change * np.asarray(sizes)[c.stage]
    peak = np.zeros(c.num_ranks, held.dtype)
    for rank in range(c.num_ranks):
        begin, end = c.first[rank], c.first[rank + 1]
        peak[rank] = max(0, np.cumsum(held[begin:end]).max(initial=0))
    return peak
