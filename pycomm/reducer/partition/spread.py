"""SpreadPartition: ranks on several hosts step together.

A step of P hosts that average n gradients, each by itself, has each send 2 (P - 1) / P n elements before it. Here
(P - 1) / P n are sent before the step, and as many after it, when each rank sends the new parameters of its part:
during the next forward, which waits only for what it uses. The state of an optimizer is kept by the rank whose part it
is of (ZeRO, Rajbhandari et al., 2020, section 5.1).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pycomm.errors import CommError
from pycomm.layout import view_like
from pycomm.optim.parameters import optimizer_parameters
from pycomm.reducer.buckets import BucketInFlight
from pycomm.reducer.partition.arrivals import Arrival, Arrivals
from pycomm.reducer.partition.partition import StepPartition, Terms
from pycomm.reducer.partition.segment import SpreadSegment, shares_of
from pycomm.transport.hosts import order_of

_LOG = logging.getLogger("pycomm")

States = dict[int, dict[str, torch.Tensor]]
"""Whole state of parameters, by their ids, then by key."""


class SpreadPartition(StepPartition):
    """Partition over ranks that reach each other by messages."""

    def __init__(self, terms: Terms) -> None:
        self._optimizer = terms.stepper.optimizer
        self._segments: dict[BucketInFlight, SpreadSegment] = {}
        self._at_home: set[torch.Tensor] = set()  # parameters whose masters are kept by parts
        self._arrivals = Arrivals(terms.module)
        self._is_lost = False
        super().__init__(terms)
        self._hook = self._optimizer.register_state_dict_post_hook(self._complete)

    def adopt(self, flights: Iterable[BucketInFlight]) -> None:
        rank = self._communicator.rank
        for flight in flights:
            bucket, params = flight.bucket, [slot.param for slot in flight.slots]
            shares = shares_of(bucket.num_elements, order_of(self._communicator.channel.transport.hosts))
            own = self._communicator.empty(bucket.num_elements * bucket.dtype.itemsize, torch.uint8).numpy()
            segment = self._segments[flight] = SpreadSegment(bucket, params, shares, rank, own)
            if not self.full_grad:
                bucket.reduce_part_only(shares, rank)
            self._settle_in(flight, segment)
            self._arrivals.expect(params)

    def await_parameters(self) -> None:
        self._arrivals.wait()

    # Steps.

    def _agree(self, optimizer: torch.optim.Optimizer, is_skipped: bool) -> bool:
        is_taken = super()._agree(optimizer, is_skipped)
        if is_taken:
            new = self._places.keys() - self._at_home
            self._stepper.move_home([param for param in self._places if param in new])
            self._at_home |= new
        return is_taken

    def _lost(self, optimizer: torch.optim.Optimizer, error: BaseException) -> None:
        if not self._is_lost:
            self._is_lost = True
            super()._lost(optimizer, error)
            self._arrivals.abandon()

    def _hand_out(self) -> None:
        lost = functools.partial(self._lost, self._optimizer)
        # The last bucket has the first layers.
        for flight in reversed(self._flights):
            params: Any = [slot.param for slot in flight.slots if slot.param.numel() > 0]
            work = flight.communicator.channel.submit(self._gathering(flight))
            if self._arrivals.may_come_late(params):
                self._arrivals.add(Arrival(params, work, lost))
            else:
                work.wait()

    def _gathering(self, flight: BucketInFlight) -> Callable[[], None]:
        channel, parts = flight.communicator.channel, self._segments[flight].own_parts()

        def gather() -> None:
            with channel.skip_checks():  # the ranks have agreed on the step
                channel.all_gather_v(parts, parts[channel.rank])

        return gather

    def _is_complete(self) -> bool:
        return False

    # State.

    def _whole_states(self) -> States:
        """Return all state that is kept by parts, gathered in new memory, by parameter. Collective."""
        found: States = {id(param): {} for param in self._places}
        for flight, segment in self._segments.items():
            for key, dtype, memory in segment.states():
                whole = torch.empty(segment.num_elements, dtype=dtype)
                mine = segment.parts_in(memory, dtype)[self._communicator.rank]
                flight.communicator.channel.all_gather_v([whole[share] for share in segment.shares], mine)
                for slot, part in zip(flight.slots, torch.split(whole, flight.bucket.numels), strict=True):
                    found[id(slot.param)][key] = view_like(part.clone(), slot.param)
        return found

    def _completed(self, entry: dict[str, Any], param: torch.Tensor, whole: States) -> dict[str, Any]:
        """Return the state ``entry`` of ``param`` with whole tensors in place of parts; what was loaded is whole."""
        if param not in self._places:
            return entry
        segment, index = self._places[param]
        parts = [k for k, v in entry.items() if isinstance(v, torch.Tensor) and segment.is_home(index, k, v)]
        return {**entry, **{key: whole[id(param)][key] for key in parts}}

    def _complete(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Replace parts by whole tensors. Collective."""
        whole, states = self._whole_states(), state_dict["state"]
        for index, param in enumerate(optimizer_parameters(optimizer)):
            if index in states:
                states[index] = self._completed(states[index], param, whole)

    def move_out(self) -> None:
        """Move parameters and whole state to memory of this rank's own, and have it step alone. Collective."""
        self._hook.remove()
        self._arrivals.close()
        try:
            self.await_parameters()
            whole = self._whole_states()
            self._stepper.take_whole(lambda entry, param: self._completed(entry, param, whole))
        except (CommError, ValueError) as error:
            _LOG.warning(
                "the optimizer's state was kept by parts on all ranks, and those of others are lost (%s): it begins "
                "anew; load a checkpoint",
                error,
            )
            self._stepper.take_whole(None)
        super().move_out()
        self._segments.clear()
        self._at_home.clear()
