"""What kernel calls run on: threads of the CPU, GPUs, and scratch memory there."""

from __future__ import annotations

import torch

import pycomm._native as _native
from pycomm import checks

_MOST_THREADS = 4096

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
        if count > _MOST_THREADS:
            raise ValueError(f"count is {count}, wanted at most {_MOST_THREADS}")
    _chosen = count


def cuda_devices() -> tuple[int, str]:
    """Return how many GPUs the kernels can use and, if none, why and what to install. Never raises."""
    return _native.cuda_devices()


class Scratch(_native.Scratch):
    """Scratch memory on a GPU, kept from call to call; without one, every call allocates its own.

    It is allocated at first use, in the library of the arrays at hand, and grows as needed. It also
    remembers the arrays of the last call, so that their addresses are sent to the GPU only when they
    change. Calls that share one must be on one stream. Calls on CPU arrays need none and ignore it.
    """
