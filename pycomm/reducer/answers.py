"""Answers to what users, and other parts, ask of a Reducer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Exchange, Flag, State
from pycomm.reducer import norms
from pycomm.reducer.arrivals import Waits
from pycomm.reducer.buckets import method_stats, nonfinite_source, state_of
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.progress import Progress
from pycomm.reducer.verdicts import all_finite


class Answers:
    """The part of :class:`pycomm.reducer.engine.Engine` that answers questions; its attributes are described there."""

    table: ParameterTable
    communicator: Communicator
    progress: Progress
    finite: Flag | None
    not_finite: str | None
    nonfinite_steps: torch.Tensor
    waits: Waits
    _num_launched: int

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that take part, by the numbers that they got when they came."""
        return tuple(range(self.communicator.size))

    def has_launched(self) -> bool:
        """Return whether some of this pass's gradients have been sent."""
        return self._num_launched > 0

    def is_waited_for(self) -> bool:
        """Return whether any bucket is in flight."""
        return any(flight.work is not None for flight in self.table.flights)

    def state(self) -> State:
        """Return what this rank carries from step to step, by parameter (not copied)."""
        return state_of(self.table.flights)

    def _exchanges(self) -> Iterator[Exchange]:
        return (flight.exchange for flight in self.table.flights)

    def stats(self) -> dict[str, Any]:
        """Return the counters of ``Reducer.stats``."""
        nonfinite_steps = int(self.nonfinite_steps.item())
        last_nonfinite = nonfinite_source(self._exchanges()) or "a sum over the ranks" if nonfinite_steps else None
        return {
            "bytes_sent": sum(flight.exchange.bytes_sent for flight in self.table.flights),
            "steps": self.progress.num_reductions,
            "wait_seconds": self.waits.seconds,
            "waits": self.waits.report(self.world),
            "nonfinite_steps": nonfinite_steps,
            "last_nonfinite": last_nonfinite,
            "num_buckets": len(self.table.flights),
            "transport": "nccl" if self.table.on_gpu else self.communicator.transport,
            **method_stats(self._exchanges()),
        }

    def name_of_not_finite(self) -> str | None:
        """Return the location or source of the first non-finite value; ``None`` if all are finite. Waits for a GPU."""
        if self.finite is not None and not bool(self.finite):
            found = nonfinite_source(self._exchanges())
            if found is not None:
                return found
        name = self.not_finite or norms.first_not_finite(self.table.gradients())
        return None if name is None else f"parameter {name!r}"

    def settle(self, was_exchanged: bool) -> bool:
        """Return whether the last gradients are finite; the same on all ranks. Waits for a GPU.

        Args:
            was_exchanged: whether the engine has sent and received them; a lone rank's are only looked at.
        """
        if not was_exchanged:
            return bool(torch.isfinite(norms.squared_norm(self.table.flights, self.table.slots(), self.table.shards)))
        if self.finite is None:
            self.finite = bool(all_finite(self.table.flights, self.table.shards))
        return bool(self.finite)
