"""Messages of a pipeline, which follow from a table's actions and the placement of its stages.

After the forward of stage s its rank sends the outputs to the rank of stage s + 1. After the backward of stage
s + 1 (or the gradient of its input, where backwards are split) its rank sends their gradients to the rank of
stage s. A tensor that skips stages goes from producer to consumer and, as a gradient, back. Nothing is sent
between stages of one rank. Messages are matched by stage and microbatch, not by their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pycomm.schedule.pipeline.table import BACKWARD, BACKWARD_INPUT, FORWARD, WEIGHTS, Columns
from pycomm.schedule.table import Ints
from pycomm.schedule.verify import ScheduleError

Skips = tuple[tuple[int, int], ...]


class MessagePlaces(NamedTuple):
    """Index into the columns of each stage's and microbatch's actions: [num_stages, num_microbatches].

    Attributes:
        backward: the whole backward, or its first part.
        weights: the whole backward, or its second part.
    """

    forward: Ints
    backward: Ints
    weights: Ints


class Messages(NamedTuple):
    """Messages, as columns: the action after which each is sent, and the action that needs it."""

    src: Ints
    dst: Ints


def places_of(c: Columns) -> MessagePlaces:
    """Return where each action is, in columns that have each exactly once."""
    cell = c.stage * c.num_microbatches + c.microbatch

    def place(*kinds: int) -> Ints:
        found = np.flatnonzero(np.isin(c.kind, kinds))
        places = np.full(c.num_stages * c.num_microbatches, -1, np.int64)
        places[cell[found]] = found
        return places.reshape(c.num_stages, c.num_microbatches)

    return MessagePlaces(place(FORWARD), place(BACKWARD, BACKWARD_INPUT), place(BACKWARD, WEIGHTS))


def edges_of(num_stages: int, skips: Skips) -> list[tuple[int, int]]:
    """Return which stages exchange tensors, as pairs (producer, consumer): neighbors first."""
    return [*((stage, stage + 1) for stage in range(num_stages - 1)), *skips]


def messages_of(c: Columns, places: MessagePlaces, skips: Skips = ()) -> Messages:
    """Return the messages of all ranks; for each action, messages to neighbors come before those that skip stages."""
    src, dst = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for producer, consumer in edges_of(c.num_stages, skips):
        if c.rank_of_stage[producer] != c.rank_of_stage[consumer]:
            src += [places.forward[producer], places.backward[consumer]]
            dst += [places.forward[consumer], places.backward[producer]]
    return Messages(np.concatenate(src), np.concatenate(dst))


def require_skips(skips: Any, num_stages: int) -> Skips:
    """Return ``skips`` as pairs of ints.

    Raises:
        ScheduleError: one is no pair of stages, or does not go to a later stage.
    """
    try:
        pairs = [tuple(pair) for pair in skips] if isinstance(skips, Iterable) else None
    except TypeError:
        pairs = None
    if pairs is None:
        raise ScheduleError(f"skips is {skips!r}, wanted pairs (producer stage, consumer stage)")
    for pair in pairs:
        if len(pair) != 2 or not all(isinstance(s, int | np.integer) and not isinstance(s, bool) for s in pair):
            raise ScheduleError(f"skips has {pair!r}, wanted pairs (producer stage, consumer stage)")
        producer, consumer = pair
        if not 0 <= producer < consumer < num_stages:
            raise ScheduleError(
                f"skips has {pair!r}, wanted a producer before its consumer, both in 0 ... {num_stages - 1}"
            )
    return tuple((int(producer), int(consumer)) for producer, consumer in pairs)
