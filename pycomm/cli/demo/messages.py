"""What the ranks tell the process that started them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Progress:
    """From rank 0, now and then; loss and time over its last few steps, as one step's are too restless to read."""

    run: int
    """Index into ``Settings.methods``."""
    step: int
    loss: float
    step_seconds: float


@dataclass
class Outcome:
    """One run. The lists have one entry per step; means over the ranks, but ``bytes_sent`` is rank 0's."""

    label: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Seconds from this rank's last gradient to the return of ``backward()``: the same stopwatch for every method."""
    reported_waits: list[float] = field(default_factory=list)
    """Seconds by ``Reducer.stats()["wait_seconds"]``; zeros for DDP, which keeps no such account."""
    bytes_sent: list[int] = field(default_factory=list)
    """So far."""
    validation_loss: float = float("nan")
    difference: str | None = None
    """The first tensor that is not bitwise equal on all ranks at the end."""


@dataclass(frozen=True)
class Results:
    """From rank 0, at the end."""

    num_parameters: int
    initial_loss: float
    """Validation loss of the untrained model, which all runs start from."""
    outcomes: list[Outcome]


Message = Progress | Results
Tell = Callable[[Message], None]
