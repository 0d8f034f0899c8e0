"""HostPartition: the ranks of a host step together, in memory that all of them reach.

One step of Adam by P ranks that average gradients of n parameters, each by itself, moves 36 P n bytes: 8 P in the
all-reduce, 28 P in the steps. Here the ranks' parts of the gradients are reduced once, each by its rank, which then
reads weights and moments of its part once and writes the new weights to all ranks: 8 P + 28; or to the one copy that
they share: 4 P + 28. With the sums made inside the step, which saves writing and reading them, 8 P + 20 and 4 P + 24.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from pycomm.compression.dense import reduce_part
from pycomm.optim.partition import Span
from pycomm.reducer.buckets import BucketInFlight
from pycomm.reducer.partition.partition import (
    CommonMemory,
    HostSegment,
    Memory,
    PartitionTerms,
    StepPartition,
    shares_of,
)


class HostPartition(StepPartition):
    """Partition over ranks that all reach one memory.

    Args:
        terms: what the ranks have agreed on.
        shares_parameters: whether they have one copy of the parameters among them.
    """

    def __init__(self, terms: PartitionTerms, *, shares_parameters: bool) -> None:
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
