"""Simulation: the time that a pipeline's table takes, and how long its ranks idle.

The model. A rank does its actions in order, each as soon as the rank is free and what it needs is there. A
message between two ranks takes ``transfer`` seconds after the action that it comes from; meanwhile its sender
works on, and no two messages are in each other's way. Any number of them may lie unreceived. Skipping tensors
are not looked at: one that takes no longer than the stages and transfers that it skips changes nothing.

With ``cores``, no more than so many ranks compute at full speed: if more want to, they share the cores evenly
(processor sharing, which is what a kernel's scheduler comes to in the long run). Ranks that wait take no core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pycomm.schedule.pipeline.sharing import shared_times
from pycomm.schedule.pipeline.table import BACKWARD, BACKWARD_INPUT, FORWARD, WEIGHTS, Columns
from pycomm.schedule.pipeline.verify import Proof, verify
from pycomm.schedule.table import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a table takes. Times are in seconds, or whatever unit the durations had.

    Attributes:
        seconds: from the first action's start to the last one's end.
        busy: [num_ranks], the seconds that each rank computes (with ``cores``, also at a part of the speed).
        idle: [num_ranks], the rest of ``seconds``.
        bubble: the fraction of all ranks' time in which they idle.
        peak_activations: [num_ranks], int64: the most activations that each rank holds at once, counted as by
            :func:`pycomm.schedule.pipeline.verify`: of one microbatch at one of its stages each.
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
        weights: seconds of the gradient of the weights. A table that splits backwards may have whole ones too,
            which take ``backward + weights``; in one that does not, they take ``backward``, and this is not used.
        transfer: seconds of a message between ranks, either way; or one for each boundary between a stage
            and the next.
        cores: how many ranks can compute at once, without an effect if ``None``.

    Raises:
        ScheduleError: ``table`` is not right: see :func:`pycomm.schedule.pipeline.verify`.
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
        start, end = shared_times(proof, seconds, delay, int(cores))
    return _simulation(proof, start, end)


def _per_stage(value: Any, name: str, count: int, of: str) -> Floats:
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {value!r}, wanted seconds, or seconds for each {of}") from error
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
