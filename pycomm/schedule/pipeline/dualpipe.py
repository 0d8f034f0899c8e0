"""DualPipeV: on every rank, microbatches that go down the ranks meet those that come up again.

P ranks have two stages each, down and up again (the published tables have 2 P where this has P). In the middle of
the step a rank alternates a forward of one stage with a backward of the other. Such a pair can hide each other's
communication. Backwards are whole there, and split at both ends of the step.

The published idle time, (P - 1)(F&B + B - 3 W) with F&B seconds for a pair, assumes that a pair is one action. This
order reaches it exactly with F&B = F + B and F = I >= W, where B = I + W. Here a pair is two actions, and the
forward's output is sent before the backward begins; each rank then idles (P - 1)(F + I - W), if F = I >= W. That
equals ZB-H1 with stages half as large. No rank holds more than 2 P + 1 activations, of one of its two stages each.

DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.2.1, and their description of DualPipeV
(github.com/deepseek-ai/DualPipe), 2025.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycomm.schedule.pipeline.build import OLDEST, Step, built, require_sizes
from pycomm.schedule.pipeline.table import BACKWARD, BACKWARD_INPUT, FORWARD, WEIGHTS, Pipeline, vee


def dualpipe_v(ranks: int, microbatches: int) -> Pipeline:
    """Make the pipeline in which microbatches that go down the ranks meet those that come up.

    For fewer than ``2 * ranks`` microbatches it is the table for ``2 * ranks`` without the others' actions.

    Raises:
        ValueError: ``ranks`` or ``microbatches`` is less than 1, or no whole number.
    """
    ranks, microbatches = require_sizes(ranks, microbatches, 2)
    programs = [_program(rank, ranks, max(microbatches, 2 * ranks)) for rank in range(ranks)]
    return built("dualpipe_v", vee(ranks), microbatches, programs, splits_weights=True)


def _program(rank: int, ranks: int, microbatches: int) -> Iterator[Step]:
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
