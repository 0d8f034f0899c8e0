"""Answers to what users, and other parts, ask of a Reducer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.compression.base import Exchange, State, method_stats
from pycomm.reducer.arrivals import Waits
from pycomm.reducer.buckets import state_of
from pycomm.reducer.figures import CompressionFigures
from pycomm.reducer.module_buffers import BufferSync
from pycomm.reducer.outcome import Outcome
from pycomm.reducer.parameters import ParameterTable
from pycomm.reducer.phases import Phases
from pycomm.reducer.progress import Progress
from pycomm.reducer.rank_comparison import RankComparison


class Answers:
    """The part of :class:`pycomm.reducer.engine.Engine` that is asked, and told, about its state; see there."""

    table: ParameterTable
    communicator: Communicator
    progress: Progress
    outcome: Outcome
    waits: Waits
    comparison: RankComparison
    phases: Phases
    figures: CompressionFigures
    buffers: BufferSync | None
    _num_launched: int

    @property
    def world(self) -> tuple[int, ...]:
        """Ranks that take part, by the numbers that they got when they came."""
        return tuple(range(self.communicator.size))

    def _named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers to compare; none if they are synchronised, which makes them equal only afterwards."""
        return [] if self.buffers is not None else self.table.named_buffers()

    def has_launched(self) -> bool:
        """Return whether some of this pass's gradients have been sent."""
        return self._num_launched > 0

    def has_launched_all(self) -> bool:
        """Return whether all of this pass's gradients have been sent, and their averages are not there yet."""
        return 0 < self._num_launched == len(self.table.flights) and self.is_waited_for()

    def is_waited_for(self) -> bool:
        """Return whether any bucket is in flight."""
        return any(flight.work is not None for flight in self.table.flights)

    def state(self) -> State:
        """Return what this rank carries from step to step, by parameter (not copied)."""
        return state_of(self.table.flights)

    def load_state(self, state: State, num_steps: int) -> None:
        """Load the state of compression, as it was after so many committed steps."""
        for flight in self.table.flights:
            flight.exchange.load_state(state)
        self.figures.forget()
        self.outcome.committed_steps.fill_(num_steps)
        self.hash_state()  # instead of the hashes that there may be of what it was

    def release(self) -> None:
        """Let go of memory that is not this object's."""
        self.comparison.replicas.state_hashes.forget()
        self.waits.close()

    def hash_state(self) -> None:
        """Have the state of compression hashed, which has just changed, if it is to be looked at before it changes."""

    def _exchanges(self) -> Iterator[Exchange]:
        return (flight.exchange for flight in self.table.flights)

    # Reductions in which ranks take part without a backward pass, or without data.

    def set_absent(self, absent: bool) -> None:
        """Note whether this rank takes part without data: then its parameters and steps are not compared."""
        self.comparison.replicas.absent = absent

    def agree_on_end(self, absent: bool) -> bool:
        """Return whether all ranks are ``absent``, after a reduction that came to nothing; adopt their last step then.

        No message is sent after reductions in which any rank had a gradient, as all ranks know that. Collective.
        """
        if any(any(exchange.used()) for exchange in self._exchanges()):
            return False
        found = torch.tensor([not absent, self.progress.num_steps])
        self.communicator.all_reduce(found, "max")
        if found[0]:
            return False
        self.progress.num_steps = int(found[1])
        self.comparison.replicas.forget_seen()
        return True

    def require_all_averaged(self) -> None:
        """Raise RuntimeError if a parameter that no rank had a gradient of has got one since."""
        for flight in self.table.flights:
            used = flight.exchange.used()
            if all(used):
                continue
            for slot in (slot for slot, there in zip(flight.slots, used, strict=True) if not there):
                grad = slot.owner.grad
                if grad is not None and bool(grad.any()):
                    raise RuntimeError(
                        f"the gradient of {slot.name!r} has not been averaged: it was set after the others had been. "
                        "Set .grad before backward(), on all ranks, or leave backward() out and set all of them"
                    )

    def stats(self) -> dict[str, Any]:
        """Return the counters of ``Reducer.stats``."""
        stats = {
            "bytes_sent": sum(flight.exchange.bytes_sent for flight in self.table.flights),
            "steps": self.progress.num_reductions,
            "wait_seconds": self.waits.seconds,
            "waits": self.waits.report(self.world),
            **self.outcome.stats(),
            "num_buckets": len(self.table.flights),
            "transport": "nccl" if self.table.on_gpu else self.communicator.transport,
            **self.phases.report(),
            **self._compression_stats(),
            **method_stats(self._exchanges()),
        }
        for key, value in self.table.earlier.items():
            stats[key] = stats.get(key, 0) + value
        if stats.get("selections"):
            stats["miss_rate"] = stats["selections_missed"] / stats["selections"]
        return stats

    def _compression_stats(self) -> dict[str, float | None]:
        """Return how much smaller what is sent is, and what compression leaves out."""
        sent = sum(flight.exchange.bytes_sent for flight in self.table.flights)
        gradients = sum(flight.bucket.flat.nbytes for flight in self.table.flights) * self.progress.num_reductions
        figures = self.figures.report(list(self._exchanges()), self.progress.num_reductions)
        return {"compression_ratio": gradients / sent if sent else None, **figures}
