"""Pipelines: tables built from each rank's actions, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pycomm.schedule.pipeline.messages import messages_of, places_of
from pycomm.schedule.pipeline.progress import run
from pycomm.schedule.pipeline.table import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    MOST_ACTIONS,
    MOST_RANKS,
    WEIGHTS,
    Action,
    Pipeline,
    columns_of,
    concatenated,
    loop,
    vee,
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


# Pipelines of one stage per rank whose backwards are whole: GPipe and 1F1B.
#
# With P ranks, M microbatches, and F and B seconds for a stage's forward and backward, each rank idles
# (P - 1)(F + B) in both, a fraction (P - 1)/(M + P - 1) of the step. They differ in memory: GPipe's ranks hold
# the activations of all M microbatches, rank r of 1F1B only of min(M, P - r).
#
# GPipe: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019,
# section 2.3 (with its backwards in the order of its forwards). 1F1B, or PipeDream-Flush: Narayanan et al.,
# "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021, section 2.2.1.


def gpipe(ranks: int, microbatches: int) -> Pipeline:
    """Make the pipeline whose ranks do all forwards, then all backwards.

    Raises:
        ValueError: ``ranks`` or ``microbatches`` is less than 1, or no whole number.
    """
    ranks, microbatches = require_sizes(ranks, microbatches)
    programs = [[*[(r, FORWARD)] * microbatches, *[(r, BACKWARD)] * microbatches] for r in range(ranks)]
    return built("gpipe", loop(ranks), microbatches, programs)


def one_f_one_b(ranks: int, microbatches: int) -> Pipeline:
    """Make the pipeline whose ranks alternate one forward and one backward, once the first backward is possible.

    Raises:
        ValueError: ``ranks`` or ``microbatches`` is less than 1, or no whole number.
    """
    ranks, microbatches = require_sizes(ranks, microbatches)
    programs = [_alternating(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks)]
    return built("one_f_one_b", loop(ranks), microbatches, programs)


def _alternating(stage: int, ahead: int, microbatches: int) -> Iterator[Step]:
    yield from [(stage, FORWARD)] * ahead
    yield from [(stage, FORWARD), (stage, BACKWARD)] * (microbatches - ahead)
    yield from [(stage, BACKWARD)] * ahead


# Interleaved 1F1B: several stages per rank, so that a microbatch passes each rank several times.
#
# Stage s is on rank s mod P. Microbatches go in groups of at least P (or one group, if there are fewer), of sizes as
# equal as possible. A group passes all of a rank's stages before the next group begins. Megatron's groups have
# exactly P, and it refuses numbers that P does not divide; for the others this is its order.
#
# With v stages per rank, of f and b seconds, each rank idles (P - 1)(f + b) if P divides the number of microbatches:
# 1/v of the idle time with one stage of v f and v b seconds. It holds more activations: up to
# (v - 1) P + 2 (P - r) - 1 on rank r, of stages that are v times smaller. Narayanan et al., "Efficient large-scale
# language model training on GPU clusters using Megatron-LM", 2021, section 2.2.2.


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Pipeline:
    """Make the pipeline whose ranks have ``stages_per_rank`` stages each, one after the other in a loop.

    Raises:
        ValueError: an argument is less than 1, or no whole number.
    """
    stages_per_rank = require_ranks(stages_per_rank, "stages_per_rank")
    ranks, microbatches = require_sizes(ranks, microbatches, stages_per_rank)
    groups = _groups(ranks, microbatches)
    programs = [_interleaved_program(rank, ranks, groups, stages_per_rank) for rank in range(ranks)]
    return built(f"interleaved({stages_per_rank})", loop(ranks, stages_per_rank), microbatches, programs)


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Return how many microbatches each group has; larger groups come first."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def _interleaved_program(rank: int, ranks: int, groups: list[int], stages_per_rank: int) -> Iterator[Step]:
    passes = range(stages_per_rank)
    forwards = [(rank + p * ranks, FORWARD) for size in groups for p in passes for _ in range(size)]
    backwards = [(rank + p * ranks, BACKWARD) for size in groups for p in reversed(passes) for _ in range(size)]
    # The first group must reach its last stage, and each rank is two slots further from the end than the next.
    ahead = min((stages_per_rank - 1) * groups[0] + 2 * (ranks - 1 - rank), len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


# Zero bubbles: gradients of weights, which no rank waits for, fill idle time.
#
# P ranks; F, I and W are the seconds of a stage's forward, gradient of the input and gradient of the weights.
#
# ZB-H1: 1F1B in which rank r delays its gradients of weights by r microbatches. With at least 2 P microbatches each
# rank idles (P - 1)(F + I - min(F, I, W)), which is the published (P - 1)(F + I - W) if W is the smallest; in 1F1B it
# idles (P - 1)(F + I + W). Every rank holds P activations, as 1F1B's first rank does. Qi et al., "Zero bubble pipeline
# parallelism", 2023, section 2.1.
#
# ZB-V: two stages per rank, down the ranks and up again. The first rank also has the last stage, so backwards begin
# early. With F = I = W and at least 2 P - 1 microbatches no rank idles between its first action and its last one. That
# is the paper's zero bubble, as each rank can begin the next step on its own. From the first rank's start to the last
# one's end each idles (P - 1) F, the time until the first microbatch reaches the last rank: no order is shorter. The
# same holds if F = I >= W >= F / 2. No rank holds more than 2 P activations, of stages half as large: what 1F1B's
# first rank holds. Ibid., section 6; Qi et al., "Pipeline parallelism with controllable memory", 2024.


def zero_bubble_h1(ranks: int, microbatches: int) -> Pipeline:
    """Make the pipeline of 1F1B in which rank r delays r gradients of weights.

    Raises:
        ValueError: ``ranks`` or ``microbatches`` is less than 1, or no whole number.
    """
    ranks, microbatches = require_sizes(ranks, microbatches)
    programs = [_h1(rank, min(ranks - 1 - rank, microbatches), microbatches) for rank in range(ranks)]
    return built("zero_bubble_h1", loop(ranks), microbatches, programs, splits_weights=True)


def _h1(stage: int, ahead: int, microbatches: int) -> Iterator[Step]:
    delayed = min(stage, microbatches)
    yield from [(stage, FORWARD)] * ahead
    for done in range(microbatches):
        if done < microbatches - ahead:
            yield stage, FORWARD
        yield stage, BACKWARD_INPUT
        if done >= delayed:
            yield stage, WEIGHTS
    yield from [(stage, WEIGHTS)] * delayed


def zero_bubble_v(ranks: int, microbatches: int) -> Pipeline:
    """Make the pipeline of two stages per rank, down and up, whose ranks do not idle once they have begun.

    For fewer than ``2 * ranks - 1`` microbatches it is the table for that many without the others' actions.

    Raises:
        ValueError: ``ranks`` or ``microbatches`` is less than 1, or no whole number.
    """
    ranks, microbatches = require_sizes(ranks, microbatches, 2)
    programs = [_v(rank, ranks, max(microbatches, 2 * ranks - 1)) for rank in range(ranks)]
    return built("zero_bubble_v", vee(ranks), microbatches, programs, splits_weights=True)


def _v(rank: int, ranks: int, microbatches: int) -> Iterator[Step]:
    """Yield the steps of ``rank`` for at least ``2 * ranks - 1`` microbatches."""
    down, up = rank, 2 * ranks - 1 - rank  # its two stages
    below = ranks - rank  # ranks from this one to the turn, itself included
    forward_down, input_down, weights_down = ((down, kind) for kind in (FORWARD, BACKWARD_INPUT, WEIGHTS))
    forward_up, input_up, weights_up = ((up, kind) for kind in (FORWARD, BACKWARD_INPUT, WEIGHTS))
    rest = [input_down, weights_down, forward_up, input_up, weights_up]
    yield from [forward_down] * (2 * below - 1)
    yield from [forward_up, forward_down] * rank
    yield from [forward_up, input_up, weights_up] * below
    yield from [forward_down, *rest] * (microbatches - (2 * below - 1) - rank)
    yield from rest * (below - 1)
    yield from [input_down, input_up] * rank
    yield from [input_down, weights_down] * below
    yield from [weights_up] * rank
    yield from [weights_down] * rank


# DualPipeV: on every rank, microbatches that go down the ranks meet those that come up again.
#
# P ranks have two stages each, down and up again (the published tables have 2 P where this has P). In the middle of
# the step a rank alternates a forward of one stage with a backward of the other. Such a pair can hide each other's
# communication. Backwards are whole there, and split at both ends of the step.
#
# The published idle time, (P - 1)(F&B + B - 3 W) with F&B seconds for a pair, assumes that a pair is one action. This
# order reaches it exactly with F&B = F + B and F = I >= W, where B = I + W. Here a pair is two actions, and the
# forward's output is sent before the backward begins; each rank then idles (P - 1)(F + I - W), if F = I >= W. That
# equals ZB-H1 with stages half as large. No rank holds more than 2 P + 1 activations, of one of its two stages each.
#
# DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.2.1, and their description of DualPipeV
# (github.com/deepseek-ai/DualPipe), 2025.


def dualpipe_v(ranks: int, microbatches: int) -> Pipeline:
    """Make the pipeline in which microbatches that go down the ranks meet those that come up.

    For fewer than ``2 * ranks`` microbatches it is the table for ``2 * ranks`` without the others' actions.

    Raises:
        ValueError: ``ranks`` or ``microbatches`` is less than 1, or no whole number.
    """
    ranks, microbatches = require_sizes(ranks, microbatches, 2)
    programs = [_dualpipe_program(rank, ranks, max(microbatches, 2 * ranks)) for rank in range(ranks)]
    return built("dualpipe_v", vee(ranks), microbatches, programs, splits_weights=True)


def _dualpipe_program(rank: int, ranks: int, microbatches: int) -> Iterator[Step]:
    """Yield the steps of ``rank`` for at least ``2 * ranks`` microbatches."""
    down, up = rank, 2 * ranks - 1 - rank  # its two stages
    below = ranks - rank - 1  # ranks between this one and the turn
    weights = (OLDEST, WEIGHTS)
    yield from [(down, FORWARD)] * (2 * below)
    yield from [(down, FORWARD), (up, FORWARD)] * (rank + 1)
    yield from [(up, BACKWARD_INPUT), weights, (up, FORWARD)] * below
    meeting = [(down, FORWARD), (up, BACKWARD), (up, FORWARD), (down, BACKWARD)]
    yield from meeting * (microbatches - 2 * ranks + rank + 1)
    yield from [(up, BACKWARD), (up, FORWARD), (down, BACKWARD)] * below
    # From here on gradients of weights are delayed, to fill the idle time at the end.
    last = [(up, BACKWARD), (down, BACKWARD)] * (rank + 1)
    yield from last[: rank + 1]
    yield from [(stage, BACKWARD_INPUT) for stage, _ in last[rank + 1 :]]
    yield from [weights, (down, BACKWARD_INPUT)] * below
    yield from [weights] * (rank + 1)
