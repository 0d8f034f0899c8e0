"""Sizes that the makers of pipelines are given."""

from __future__ import annotations

from pycomm.schedule.pipeline.table import MOST_ACTIONS, MOST_RANKS
from pycomm.schedule.table import require_ranks


def require_sizes(ranks: int, microbatches: int, stages_per_rank: int = 1) -> tuple[int, int]:
    """Return both numbers as ints.

    Raises:
        ValueError: one is less than 1, or no whole number; or a table cannot have as many.
    """
    ranks = require_ranks(ranks, "ranks")
    microbatches = require_ranks(microbatches, "microbatches")
    stages_per_rank = require_ranks(stages_per_rank, "stages_per_rank")
    if ranks > MOST_RANKS:
        raise ValueError(f"ranks is {ranks}, wanted at most {MOST_RANKS}")
    actions = 3 * ranks * stages_per_rank * microbatches
    if actions > MOST_ACTIONS:
        raise ValueError(
            f"{ranks} ranks with {stages_per_rank} stages each and {microbatches} microbatches make up to {actions} "
            f"actions, wanted at most {MOST_ACTIONS}"
        )
    return ranks, microbatches
