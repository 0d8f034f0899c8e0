"""HostPartition: the ranks of a host step together, in memory that all of them reach.

One step of Adam by P ranks that average gradients of n parameters, each by itself, moves 36 P n bytes: 8 P in the
all-reduce, 28 P in the steps. Here the ranks' parts of the gradients are reduced once, each by its rank, which then
reads weights and moments of its part once and writes the new weights to all ranks: 8 P + 28; or to the one copy that
they share: 4 P + 28. With the sums made inside the step, which saves writing and reading them, 8 P + 20 and 4 P + 24.
"""

from __future__ import annotations

import itertools
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pycomm.bucket import Bucket
from pycomm.compression.dense import reduce_part
from pycomm.optim.partition import Span
from pycomm.reducer.buckets import BucketInFlight
from pycomm.reducer.partition.opening import CommonMemory, Memory, tensor_in, tensor_like
from pycomm.reducer.partition.partition import StepPartition, Terms

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


class HostPartition(StepPartition):
    """Partition over ranks that all reach one memory.

    Args:
        terms: what the ranks have agreed on.
        shares_parameters: whether they have one copy of the parameters among them.
    """

    def __init__(self, terms: Terms, *, shares_parameters: bool) -> None:
        self._shares_parameters, self._defers = shares_parameters, terms.grads == "local"
        self._memory = CommonMemory(terms.communicator)
        self._terms: dict[BucketInFlight, tuple[int, list[Memory]]] = {}
        self._terms_version = 0
        self._flight_of: dict[torch.Tensor, BucketInFlight] = {}
        # How many steps each rank has taken, to the end of its own part.
        self._num_taken = np.frombuffer(self._memory.of_one(8 * terms.communicator.size), np.int64)
        super().__init__(terms)

    def adopt(self, flights: Iterable[BucketInFlight]) -> None:
        rank, size = self._communicator.rank, self._communicator.size
        for flight in flights:
            params = [slot.param for slot in flight.slots]
            shares = shares_of(flight.bucket.num_elements, range(size))
            segment = HostSegment(flight.bucket, params, shares, rank, self._memory, self._shares_parameters)
            if not self.full_grad:
                flight.bucket.reduce_part_only(shares, rank, later=self._defers)
            self._settle_in(flight, segment)
            self._flight_of.update(dict.fromkeys(params, flight))
            self._stepper.move_home(params)
        self._communicator.barrier()  # what is shared has been written by all

    def _fill(self, place: torch.Tensor, param: torch.Tensor, span: Span) -> None:
        if self._shares_parameters:
            span.of(place).copy_(span.of(param))
        else:
            super()._fill(place, param, span)

    def move_out(self) -> None:
        super().move_out()
        self._flight_of.clear()
        self._terms.clear()

    def release(self) -> None:
        self._memory.release()

    # Gradients that are reduced in the step.

    @property
    def terms_version(self) -> int:
        return self._terms_version if self._is_deferred() else 0

    def terms_of(self, param: torch.Tensor) -> list[torch.Tensor]:
        segment, index = self._places[param]
        return [segment.part_in(memory, index) for memory in self._terms[self._flight_of[param]][1]]

    def _is_deferred(self) -> bool:
        return any(flight.bucket.is_deferred for flight in self._flights)

    def require_reduced(self) -> None:
        for flight in self._flights:
            if flight.bucket.is_deferred:
                reduce_part(flight.communicator, flight.bucket, flight.bucket.memory, self.reduction)

    def reduce_early(self) -> None:
        self.require_reduced()
        self._defers = False
        for flight in self._flights:
            flight.bucket.defers = False

    def _open_terms(self) -> None:
        for flight in self._flights:
            flat = flight.bucket.flat
            self._terms[flight] = flat.data_ptr(), self._memory.of_all(flat)
        self._terms_version += 1

    def _has_moved(self) -> bool:
        known = {flight: address for flight, (address, _) in self._terms.items()}
        return self._is_deferred() and any(known.get(f) != f.bucket.flat.data_ptr() for f in self._flights)

    # Steps.

    def _hand_out(self) -> None:
        self._num_taken[self._communicator.rank] = self._num_steps
        self._communicator.barrier()

    def _is_complete(self) -> bool:
        return bool((self._num_taken >= self._num_steps).all())

    def _lost(self, optimizer: torch.optim.Optimizer, error: BaseException) -> None:
        super()._lost(optimizer, error)
        # Ranks that have not noticed yet go on writing to what all reach: a checkpoint is not to be loaded into that.
        for param in self._places:
            param.data = param.detach().clone(memory_format=torch.preserve_format)
