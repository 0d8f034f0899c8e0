"""Segment: the parameters of a bucket, cut into as many parts as there are ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from pycomm.bucket import Bucket
from pycomm.optim.partition import Span
from pycomm.reducer.partition.common_memory import CommonMemory, Memory, tensor_in, tensor_like

_ALIGNMENT = 64
"""Parts begin at multiples of so many elements: two ranks never write to the same line of a cache."""


def bounds_of(num_elements: int, size: int) -> list[int]:
    """Return where the parts of ``size`` ranks begin, and the last one ends: parts that are equal but for rounding."""
    pieces = -(-num_elements // _ALIGNMENT)
    return [min(pieces * rank // size * _ALIGNMENT, num_elements) for rank in range(size + 1)]


class Segment:
    """Parameters of ``bucket`` in memory that all ranks reach, one after the other, as the gradients are.

    Args:
        bucket: the gradients.
        params: the parameters; :meth:`move_in` moves them.
        memory: allocator.
        rank, size: this rank, and the number of ranks.
        shares_parameters: whether the ranks have one copy of the parameters among them.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[torch.Tensor],
        memory: CommonMemory,
        rank: int,
        size: int,
        shares_parameters: bool,
    ) -> None:
        self._memory, self._rank, self._size = memory, rank, size
        self.bounds = bounds_of(bucket.num_elements, size)
        self._dtype = bucket.dtype
        self._num_elements = bucket.num_elements
        self._begins = list(itertools.accumulate(bucket.numels, initial=0))
        num_bytes = self._num_elements * self._dtype.itemsize
        everyone = [memory.of_one(num_bytes)] if shares_parameters else memory.of_each(num_bytes)
        self._own = everyone[0 if shares_parameters else rank]
        # Each rank begins with another one, so that they do not all write to the same memory at once.
        self._others = [] if shares_parameters else [everyone[(rank + i) % size] for i in range(1, size)]
        self._states: dict[tuple[str, torch.dtype], Memory] = {}
        self.places = [tensor_like(p, self._own, self._dtype, self._begins[i]) for i, p in enumerate(params)]
        self.spans = [self._span(i) for i in range(len(params))]

    def _span(self, index: int) -> Span:
        first, last = self._begins[index], self._begins[index + 1]
        begin, end = self.bounds[self._rank], self.bounds[self._rank + 1]
        if end <= first or begin >= last:
            return Span(0, 0)
        return Span(max(begin - first, 0), min(end, last) - first)

    def mirrors_of(self, index: int) -> list[torch.Tensor]:
        """Return the other ranks' memory of this rank's own elements of the ``index``-th parameter."""
        return [self.part_in(memory, index) for memory in self._others]

    def part_in(self, memory: Memory, index: int) -> torch.Tensor:
        """Return this rank's own elements of the ``index``-th parameter in memory that is laid out as the bucket."""
        begin, end = (self._begins[index] + at for at in self.spans[index])
        return tensor_in(memory, self._dtype, begin, end)

    def home(self, index: int, param: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the state ``key`` of the ``index``-th parameter. Collective, the first time for a key."""
        if (key, dtype) not in self._states:
            self._states[key, dtype] = self._memory.of_one(self._num_elements * dtype.itemsize)
        return tensor_like(param, self._states[key, dtype], dtype, self._begins[index])
