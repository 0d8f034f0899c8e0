"""Interleaved 1F1B: several stages per rank, so that a microbatch passes each rank several times.

Stage s is on rank s mod P. Microbatches go in groups of at least P (or one group, if there are fewer), of sizes as
equal as possible. A group passes all of a rank's stages before the next group begins. Megatron's groups have
exactly P, and it refuses numbers that P does not divide; for the others this is its order.

With v stages per rank, of f and b seconds, each rank idles (P - 1)(f + b) if P divides the number of microbatches:
1/v of the idle time with one stage of v f and v b seconds. It holds more activations: up to
(v - 1) P + 2 (P - r) - 1 on rank r, of stages that are v times smaller. Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM", 2021, section 2.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycomm.schedule.pipeline.build import Step, built, require_sizes
from pycomm.schedule.pipeline.table import BACKWARD, FORWARD, Pipeline, loop
from pycomm.schedule.table import require_ranks


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Pipeline:
    """Make the pipeline whose ranks have ``stages_per_rank`` stages each, one after the other in a loop.

    Raises:
        ValueError: an argument is less than 1, or no whole number.
    """
    stages_per_rank = require_ranks(stages_per_rank, "stages_per_rank")
    ranks, microbatches = require_sizes(ranks, microbatches, stages_per_rank)
    groups = _groups(ranks, microbatches)
    programs = [_program(rank, ranks, groups, stages_per_rank) for rank in range(ranks)]
    return built(f"interleaved({stages_per_rank})", loop(ranks, stages_per_rank), microbatches, programs)


def _groups(ranks: int, microbatches: int) -> list[int]:
    """Return how many microbatches each group has; larger groups come first."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def _program(rank: int, ranks: int, groups: list[int], stages_per_rank: int) -> Iterator[Step]:
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
