"""How many threads the CPU kernels use."""

from __future__ import annotations

import torch

_chosen: int | None = None


def num_threads() -> int:
    """Threads per kernel call: what :func:`set_num_threads` chose, else torch's own number."""
    return torch.get_num_threads() if _chosen is None else _chosen


def set_num_threads(count: int | None) -> None:
    """Use ``count`` threads per kernel call; ``None`` follows ``torch.get_num_threads()`` again.

    Raises:
        ValueError: ``count`` is not positive.
    """
    global _chosen
    if count is not None and count < 1:
        raise ValueError(f"count is {count}, wanted at least 1 (or None to follow torch)")
    _chosen = count
