"""Pipelines of one stage per rank whose backwards are whole: GPipe and 1F1B.

With P ranks, M microbatches, and F and B seconds for a stage's forward and backward, each rank idles
(P - 1)(F + B) in both, a fraction (P - 1)/(M + P - 1) of the step. They differ in memory: GPipe's ranks hold
the activations of all M microbatches, rank r of 1F1B those of min(M, P - r).

GPipe: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019,
section 2.3 (with its backwards in the order of its forwards). 1F1B, or PipeDream-Flush: Narayanan et al.,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021, section 2.2.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycomm.schedule.pipeline.build import Step, built, require_sizes
from pycomm.schedule.pipeline.table import BACKWARD, FORWARD, Pipeline, loop


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
