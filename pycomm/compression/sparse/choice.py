"""Choice among the sparse sums: the fewest bytes win."""

from __future__ import annotations

import torch

from pycomm.bucket import Bucket
from pycomm.communicator import Communicator
from pycomm.compression.base import Operation
from pycomm.compression.codec import wide_dtype
from pycomm.compression.sparse.balanced import BalancedSum, split_room, sum_room
from pycomm.compression.sparse.sums import DenseSum, Entries, GatheredSum, SparseSum

WAYS: dict[str, type[GatheredSum | BalancedSum | DenseSum]] = {
    "gathered": GatheredSum,
    "balanced": BalancedSum,
    "dense": DenseSum,
}

_BALANCED_MARGIN = 1.3
"""Factor by which the balanced sum must take fewer bytes: it has one more step, and drops what has no room."""


def received_bytes(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool) -> dict[str, float]:
    """Return the bytes that each way brings to a rank if every rank has ``count`` entries; headers not counted."""
    others = size - 1
    split, sums = _balanced_bytes(num_elements, count, size, dtype, half)
    return {
        "gathered": others * Entries(dtype, num_elements, count, half).num_bytes(),
        "balanced": others * (split + sums),
        "dense": 2 * others / size * num_elements * dtype.itemsize,
    }


def choose_way(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool, on_gpu: bool) -> str:
    """Return the way with the fewest bytes: a function of what all ranks know."""
    costs = received_bytes(num_elements, count, size, dtype, half)
    if on_gpu:
        del costs["balanced"]
    else:
        costs["balanced"] *= _BALANCED_MARGIN
    return min(costs, key=lambda way: costs[way])


def operations(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool) -> list[Operation]:
    """Return the collectives of the way that is chosen on the CPU; headers not counted."""
    way = choose_way(num_elements, count, size, dtype, half, on_gpu=False)
    if way == "dense":
        return [Operation("all_reduce", num_elements * dtype.itemsize)]
    if way == "gathered":
        return [Operation("all_gather", Entries(dtype, num_elements, count, half).num_bytes())]
    split, sums = _balanced_bytes(num_elements, count, size, dtype, half)
    return [Operation("all_to_all", size * split), Operation("all_gather", sums)]


def _balanced_bytes(num_elements: int, count: int, size: int, dtype: torch.dtype, half: bool) -> tuple[int, int]:
    """Return the bytes of one rank's entries in one part, and of one part's sums."""
    part = max(1, num_elements // size)
    room = min(sum_room(count, size, None), part)
    sums = min(part * dtype.itemsize, Entries(dtype, part, room, half).num_bytes())
    return Entries(dtype, part, split_room(count, size), half).num_bytes(), sums


def make_sparse_sum(bucket: Bucket, communicator: Communicator, count: int, half: bool) -> SparseSum:
    """Make the sparse sum to take for ``count`` entries of every rank."""
    dtype = wide_dtype(bucket)
    way = choose_way(bucket.num_elements, count, communicator.size, dtype, half, bucket.on_gpu)
    return WAYS[way](bucket, communicator, count, half)
