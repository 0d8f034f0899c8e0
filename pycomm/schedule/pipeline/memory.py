"""Memory of a pipeline: how many activations each rank holds at once.

The forward of a stage leaves activations of its microbatch behind, which its backward needs; they are free
after the whole backward or, where it is split, after the gradient of the weights. (The gradient of the input
frees some of them in an implementation that looks after that; none is counted here.) Since a rank does its
actions one by one, in order, its peak does not depend on how long anything takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pycomm.schedule.pipeline.messages import MessagePlaces
from pycomm.schedule.pipeline.table import Columns
from pycomm.schedule.table import Ints


def peaks(c: Columns, places: MessagePlaces, sizes: Any = None) -> Ints:
    """Return the most that each rank holds at once: [num_ranks].

    Args:
        sizes: [num_stages], what a microbatch leaves behind at each stage, in any unit; ``None``: 1.
    """
    change = np.zeros(len(c), np.int64)
    change[places.forward.ravel()] += 1
    change[places.weights.ravel()] -= 1
    held: npt.NDArray[Any] = change if sizes is None else change * np.asarray(sizes)[c.stage]
    peak = np.zeros(c.num_ranks, held.dtype)
    for rank in range(c.num_ranks):
        begin, end = c.first[rank], c.first[rank + 1]
        peak[rank] = max(0, np.cumsum(held[begin:end]).max(initial=0))
    return peak
