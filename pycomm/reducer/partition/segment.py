"""Segments: the parameters of a bucket, one after the other in flat memory, cut into a part for each rank."""

from __future__ import annotations

import itertools
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from pycomm.bucket import Bucket
from pycomm.optim.partition import Span
from pycomm.reducer.partition.common_memory import CommonMemory, Memory, tensor_in, tensor_like

_ALIGNMENT = 64
"""Parts begin at multiples of so many elements: two ranks never write to the same line of a cache."""


def shares_of(num_elements: int, order: Sequence[int]) -> list[slice]:
    """Return the part of each rank, all equal but for rounding; they lie in memory in ``order``."""
    size, pieces = len(order), -(-num_elements // _ALIGNMENT)
    bounds = [min(pieces * place // size * _ALIGNMENT, num_elements) for place in range(size + 1)]
    shares = {rank: slice(bounds[place], bounds[place + 1]) for place, rank in enumerate(order)}
    return [shares[rank] for rank in range(size)]


class Segment(ABC):
    """Parameters of ``bucket``, laid out as the gradients are.

    Args:
        bucket: the gradients.
        params: the parameters.
        shares: the part of each rank.
        rank: this rank.
        own: memory that the parameters are to be in.

    Attributes:
        places: where each parameter is to be.
        spans: this rank's own elements of each.
    """

    def __init__(
        self, bucket: Bucket, params: Sequence[torch.Tensor], shares: Sequence[slice], rank: int, own: Memory
    ) -> None:
        self.shares, self._rank, self.own = shares, rank, own
        self.dtype, self.num_elements = bucket.dtype, bucket.num_elements
        self._begins = list(itertools.accumulate(bucket.numels, initial=0))
        self._states: dict[tuple[str, torch.dtype], Memory] = {}
        self.places = [self.like(p, i, own, self.dtype) for i, p in enumerate(params)]
        self.spans = [self._span(i) for i in range(len(params))]

    def _span(self, index: int) -> Span:
        first, last = self._begins[index], self._begins[index + 1]
        share = self.shares[self._rank]
        if share.stop <= first or share.start >= last:
            return Span(0, 0)
        return Span(max(share.start - first, 0), min(share.stop, last) - first)

    def part_in(self, memory: Memory, index: int) -> torch.Tensor:
        """Return this rank's own elements of the ``index``-th parameter in memory that is laid out as the bucket."""
        begin, end = (self._begins[index] + at for at in self.spans[index])
        return tensor_in(memory, self.dtype, begin, end)

    def like(self, param: torch.Tensor, index: int, memory: Memory, dtype: torch.dtype) -> torch.Tensor:
        """Return the place of the ``index``-th parameter, which is ``param``, in memory laid out so."""
        return tensor_like(param, memory, dtype, self._begins[index])

    @abstractmethod
    def mirrors_of(self, index: int) -> list[torch.Tensor]:
        """Return the other ranks' memory of this rank's own elements of the ``index``-th parameter."""

    def home(self, index: int, param: torch.Tensor, key: str, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the state ``key`` of the ``index``-th parameter, zeros at first.

        Collective, where ranks share it, the first time for a key.
        """
        if (key, dtype) not in self._states:
            self._states[key, dtype] = self._zeros(self.num_elements * dtype.itemsize)
        return self.like(param, index, self._states[key, dtype], dtype)

    def is_home(self, index: int, key: str, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies at the home of the state ``key`` of the ``index``-th parameter."""
        memory = self._states.get((key, tensor.dtype))
        if memory is None or tensor.numel() == 0:
            return False
        home = tensor_in(memory, tensor.dtype, self._begins[index], self._begins[index + 1])
        return tensor.data_ptr() == home.data_ptr()

    @abstractmethod
    def _zeros(self, num_bytes: int) -> Memory: ...


class HostSegment(Segment):
    """Segment in memory that all ranks reach.

    Args:
        bucket, params, shares, rank: as above.
        memory: allocator.
        shares_parameters: whether the ranks have one copy of the parameters among them.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Sequence[torch.Tensor],
        shares: Sequence[slice],
        rank: int,
        memory: CommonMemory,
        shares_parameters: bool,
    ) -> None:
        self._memory, size = memory, len(shares)
        num_bytes = bucket.num_elements * bucket.dtype.itemsize
        everyone = [memory.of_one(num_bytes)] if shares_parameters else memory.of_each(num_bytes)
        # Each rank begins with another one, so that they do not all write to the same memory at once.
        self._others = [] if shares_parameters else [everyone[(rank + i) % size] for i in range(1, size)]
        super().__init__(bucket, params, shares, rank, everyone[0 if shares_parameters else rank])

    def mirrors_of(self, index: int) -> list[torch.Tensor]:
        return [self.part_in(memory, index) for memory in self._others]

    def _zeros(self, num_bytes: int) -> Memory:
        return self._memory.of_one(num_bytes)


class SpreadSegment(Segment):
    """Segment of ranks that reach each other by messages.

    State is laid out as that of all ranks, but only this rank's part is ever touched, so that only that takes memory.
    """

    def mirrors_of(self, index: int) -> list[torch.Tensor]:
        return []

    def _zeros(self, num_bytes: int) -> Memory:
        return mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def own_parts(self) -> list[torch.Tensor]:
        """Return the parameters as one flat part for each rank."""
        return self.parts_in(self.own, self.dtype)

    def parts_in(self, memory: Memory, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the parts of the ranks in memory that is laid out as the bucket."""
        return [tensor_in(memory, dtype, share.start, share.stop) for share in self.shares]

    def states(self) -> list[tuple[str, torch.dtype, Memory]]:
        """Return the keys, dtypes and memory of all state, in an order that is the same on all ranks."""
        return [(*key, self._states[key]) for key in sorted(self._states, key=str)]
