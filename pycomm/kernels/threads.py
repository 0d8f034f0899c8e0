"""Number of threads of the CPU kernels."""

from __future__ import annotations

import torch

from pycomm import checks

_MOST = 4096

_chosen: int | None = None


def num_threads() -> int:
    """Return the number of threads per kernel call: as :func:`set_num_threads` chose, else torch's own number."""
    return torch.get_num_threads() if _chosen is None else _chosen


def set_num_threads(count: int | None) -> None:
    """Use ``count`` threads per kernel call; ``None`` follows ``torch.get_num_threads()`` again.

    Raises:
        ValueError: ``count`` is not positive, or absurdly large. TypeError: it is not an int.
    """
    global _chosen
    if count is not None:
        count = checks.count("count", count, 1)
        if count > _MOST:
            raise ValueError(f"count is {count}, wanted at most {_MOST}")
    _chosen = count
