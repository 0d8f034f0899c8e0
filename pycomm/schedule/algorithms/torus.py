"""Torus: reduce-scatter in the rows, all-reduce in the columns, all-gather in the rows.

X x Y ranks; row y is the ranks yX, ..., yX + X - 1, for example of one host. Each column moves only
1/X of the array, and all columns work at once.

With rings, steps 2(X - 1) + 2(Y - 1), bytes 2n(X - 1)/X in the rows and 2(n/X)(Y - 1)/Y in the columns,
together the ring's 2n(P - 1)/P. Best where rows are fast, or the ring's steps too many.

Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", arXiv 1811.05233, 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pycomm.schedule.algorithms.circulant import circulant_all_gather, circulant_reduce_scatter
from pycomm.schedule.algorithms.direct import direct_all_gather, direct_reduce_scatter
from pycomm.schedule.algorithms.halving_doubling import doubling_all_gather, halving_reduce_scatter
from pycomm.schedule.algorithms.ring import ring, ring_all_gather, ring_reduce_scatter
from pycomm.schedule.collective import Schedule
from pycomm.schedule.table import Round, embed, require_ranks

ROWS: dict[str, tuple[Callable[[int], Schedule], Callable[[int], Schedule]]] = {
    "ring": (ring_reduce_scatter, ring_all_gather),
    "halving_doubling": (halving_reduce_scatter, doubling_all_gather),
    "circulant": (circulant_reduce_scatter, circulant_all_gather),
    "direct": (direct_reduce_scatter, direct_all_gather),
}
"""Algorithms of a row: the reduce-scatter, and the all-gather that undoes it."""


def torus(x: int, y: int, rows: str = "ring", columns: Callable[[int], Schedule] = ring) -> Schedule:
    """Make an all-reduce among ``x * y`` ranks in ``y`` rows of ``x``.

    Args:
        rows: the algorithm of a row, of ``ROWS``. columns: the all-reduce of a column.

    Raises:
        ValueError: ``x`` or ``y`` < 1, unknown ``rows``, or one that does not factor ``x``.
    """
    x, y = require_ranks(x, "x"), require_ranks(y, "y")
    if rows not in ROWS:
        raise ValueError(f"rows is {rows!r}, wanted one of {', '.join(ROWS)}")
    scatter, gather = (make(x) for make in ROWS[rows])
    column = columns(y)
    assert scatter.owners is not None
    owned = np.argsort(scatter.owners)  # by column
    grid = np.arange(x * y).reshape(y, x)
    per_piece = column.num_chunks

    def generate() -> Iterator[Round]:
        yield from embed(scatter.rounds(), grid, 0, per_piece)
        yield from embed(column.rounds(), grid.T, owned * per_piece, 1)
        yield from embed(gather.rounds(), grid, 0, per_piece)

    chosen = "" if (rows, column.name) == ("ring", "ring") else f",{rows},{column.name}"
    return Schedule(f"torus({x},{y}{chosen})", x * y, x * per_piece, generate)
