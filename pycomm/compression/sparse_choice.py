"""Which of the sparse sums a bucket takes."""

from __future__ import annotations

import torch

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.balanced_sum import BalancedSum, split_room, sum_room
from pycomm.compression.feedback import wide_dtype
from pycomm.compression.sparse_sum import DenseSum, Entries, GatheredSum, SparseSum

WAYS: dict[str, type[GatheredSum | BalancedSum | DenseSum]] = {
    "gathered": GatheredSum,
    "balanced": BalancedSum,
    "dense": DenseSum,
}

_WORTH = 1.3
"""How many times fewer bytes the balanced sum must take: it has one more step, and drops what has no room."""


def received_bytes(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool) -> dict[str, float]:
    """What each way brings to a rank, of ``count`` entries of every rank: bytes, headers not counted."""
    others = size - 1
    split, sums = _balanced_bytes(num_elements, count, size, dtype, half)
    return {
        "gathered": others * Entries(dtype, num_elements, count, half).num_bytes(),
        "balanced": others * (split + sums),
        "dense": 2 * others / size * num_elements * dtype.itemsize,
    }


def choose_way(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool, on_gpu: bool) -> str:
    """The way with the fewest bytes; a function of what all ranks know."""
    costs = received_bytes(num_elements, count, size, dtype, half)
    if on_gpu:
        del costs["balanced"]
    else:
        costs["balanced"] *= _WORTH
    return min(costs, key=lambda way: costs[way])


def operations(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool) -> list[tuple[str, int]]:
    """The collectives of the chosen way and their bytes, as a rank hands them over; headers not counted."""
    way = choose_way(num_elements, count, size, dtype, half, on_gpu=False)
    if way == "dense":
        return [("all_reduce", num_elements * dtype.itemsize)]
    if way == "gathered":
        return [("all_gather", Entries(dtype, num_elements, count, half).num_bytes())]
    split, sums = _balanced_bytes(num_elements, count, size, dtype, half)
    return [("all_to_all", size * split), ("all_gather", sums)]


def _balanced_bytes(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool) -> tuple[int, int]:
    """Of one rank's entries in one part, and of one part's sums."""
    part = max(1, num_elements // size)
    room = min(sum_room(count, size, None), part)
    sums = min(part * dtype.itemsize, Entries(dtype, part, room, half).num_bytes())
    return Entries(dtype, part, split_room(count, size), half).num_bytes(), sums


def make_sparse_sum(bucket: Bucket, communicator: Communicator, count: int, half: bool) -> SparseSum:
    """For ``count`` entries of every rank."""
    dtype = wide_dtype(bucket)
    way = choose_way(bucket.num_elements, count, communicator.size, dtype, half, bucket.on_gpu)
    return WAYS[way](bucket, communicator, count, half)
