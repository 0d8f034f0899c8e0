"""Zero bubbles: gradients of weights, which no rank waits for, fill idle time.

P ranks; F, I and W are the seconds of a stage's forward, gradient of the input and gradient of the weights.

ZB-H1: 1F1B in which rank r delays its gradients of weights by r microbatches. With at least 2 P microbatches each
rank idles (P - 1)(F + I - min(F, I, W)), which is the published (P - 1)(F + I - W) if W is the smallest; in 1F1B it
idles (P - 1)(F + I + W). Every rank holds P activations, as 1F1B's first rank does. Qi et al., "Zero bubble pipeline
parallelism", 2023, section 2.1.

ZB-V: two stages per rank, down the ranks and up again. The first rank also has the last stage, so backwards begin
early. With F = I = W and at least 2 P - 1 microbatches no rank idles between its first action and its last one. That
is the paper's zero bubble, as each rank can begin the next step by itself. From the first rank's start to the last
one's end each idles (P - 1) F, the time until the first microbatch reaches the last rank: no order is shorter. The
same holds if F = I >= W >= F / 2. No rank holds more than 2 P activations, of stages half as large: what 1F1B's
first rank holds. Ibid., section 6; Qi et al., "Pipeline parallelism with controllable memory", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycomm.schedule.pipeline.build import Step, built, require_sizes
from pycomm.schedule.pipeline.table import BACKWARD_INPUT, FORWARD, WEIGHTS, Pipeline, loop, vee


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
