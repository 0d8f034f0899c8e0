"""Columns in which the actions of a table are written down: in files, and in pictures."""

from __future__ import annotations

from typing import Any

import numpy as np

from pycomm.schedule.pipeline.table import Columns, columns_of
from pycomm.schedule.table import Ints
from pycomm.schedule.verify import ScheduleError

_MOST_CELLS = 1 << 26


def slots(table: Any) -> tuple[Columns, Ints, int]:
    """Return the table, read, for each of its actions the column that stands for its time, and how many there are.

    Times at which no rank has an action get no column.

    Raises:
        ScheduleError: ``table`` is none, a number in it is out of range, or it is too sparse to be written down.
    """
    c = columns_of(table)
    times, column = np.unique(c.time, return_inverse=True)
    if len(times) * c.num_ranks > _MOST_CELLS:
        raise ScheduleError(
            f"{c.num_ranks} ranks with actions at {len(times)} times make more than {_MOST_CELLS} cells"
        )
    return c, column.astype(np.int64), len(times)
