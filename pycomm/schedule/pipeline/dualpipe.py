"""DualPipeV: microbatches that go down the ranks meet, on every rank, those that come up again.

P ranks have two stages each, down and up again (the published tables call 2 P what is P here). In the middle of
the step a rank does a forward of one stage and a backward of the other in turns: a pair, whose communication an
implementation can hide behind each other. Backwards are whole there, and split at both ends of the step.

The published idle time, (P - 1)(F&B + B - 3 W) with the seconds F&B of a pair, is for pairs that are done as one:
this order reaches it exactly with F&B = F + B and F = I >= W, where B = I + W. Here a pair is two actions, and the
forward's output leaves before the backward begins: then each rank idles (P - 1)(F + I - W), if F = I >= W; as much
as ZB-H1's with stages half as large. No rank holds more than 2 P + 1 activations, of half a rank's stages each.

DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.2.1, and their description of the half that is cut out
of it (github.com/deepseek-ai/DualPipe), 2025.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycomm.schedule.pipeline.build import BACKWARD, BACKWARD_INPUT, FORWARD, OLDEST, WEIGHTS, Step, built
from pycomm.schedule.pipeline.sizes import require_sizes
from pycomm.schedule.pipeline.table import Pipeline, vee


def dualpipe_v(ranks: int, microbatches: int) -> Pipeline:
    """Make the pipeline in which microbatches that go down the ranks meet those that come up.

    Of fewer than ``2 * ranks`` microbatches it is what remains of one of so many.

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
    # From the middle of what is left weights are put off, to fill what would be idle at the end.
    last = [(up, BACKWARD), (down, BACKWARD)] * (rank + 1)
    yield from last[: rank + 1]
    yield from [(stage, BACKWARD_INPUT) for stage, _ in last[rank + 1 :]]
    yield from [weights, (down, BACKWARD_INPUT)] * below
    yield from [weights] * (rank + 1)
