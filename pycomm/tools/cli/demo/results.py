"""Results of the ranks, and the figures computed from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_SMALLEST_FALL = 0.05  # of the loss, in nats per byte; less is not learning
_FEWEST_STEPS = 20  # after fewer, the loss need not have fallen
_MOST_SMOOTHING = 20  # steps
_CLEARLY = 1.05

Array = npt.NDArray[np.float64]


def smoothed(losses: Sequence[float]) -> Array:
    """Return the running mean of the losses over up to 20 steps."""
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - _MOST_SMOOTHING)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


@dataclass
class RunOutcome:
    """One run.

    Attributes:
        turns: seconds of each step by turn, of the slowest rank; the first turn only warms up.
        losses: of each step, means over the ranks.
        wire_bytes: sent by a host per step; ``None`` on one host.
        difference: the first tensor that is not bitwise equal on all ranks at the end.
    """

    label: str
    turns: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    wire_bytes: float | None = None
    validation_loss: float = math.nan
    difference: str | None = None

    @property
    def seconds(self) -> Array:
        """Seconds from the beginning of the training to the end of each step."""
        return np.cumsum(np.concatenate(self.turns))

    @property
    def step_seconds(self) -> float:
        """Median over the steps after the warm-up."""
        return float(np.median(np.concatenate(self.turns[1:])))

    def seconds_to(self, loss: float) -> float | None:
        """Return the seconds after which the smoothed loss reached ``loss``; ``None`` if it did not."""
        reached = np.flatnonzero(smoothed(self.losses) <= loss)
        return float(self.seconds[reached[0]]) if len(reached) else None


@dataclass(frozen=True)
class Death:
    """Training during which a rank was killed.

    Attributes:
        ranks: number of ranks at the beginning; the last one was killed.
        step: step in which it was killed, counted from 1.
        seconds: of each step; the step with the death took ``seconds[step - 1]``.
    """

    ranks: int
    step: int
    seconds: list[float]
    losses: list[float]


@dataclass
class Results:
    """Results of the whole demo.

    Attributes:
        initial_loss: validation loss of the untrained model, the same for all runs.
        host, link: the runs of each part; DDP first.
    """

    num_parameters: int
    initial_loss: float
    host: list[RunOutcome]
    link: list[RunOutcome]
    death: Death | None = None


@dataclass(frozen=True)
class Speed:
    """Steps per second as a multiple of another run's: median and quartiles over the turns."""

    low: float
    value: float
    high: float

    @property
    def is_clearly_higher(self) -> bool:
        return self.value >= _CLEARLY and self.low > 1.0


def speed(run: RunOutcome, base: RunOutcome) -> Speed:
    """Compare turn by turn: consecutive turns see the same load of the machine."""
    pairs = zip(run.turns[1:], base.turns[1:], strict=False)
    by_turn = [float(np.median(theirs) / np.median(ours)) for ours, theirs in pairs]
    return Speed(*map(float, np.quantile(by_turn, (0.25, 0.5, 0.75))))


def problems(results: Results) -> list[str]:
    """Return the failures: replicas that differ, losses that did not fall."""
    found = []
    for outcome in (*results.host, *results.link):
        if outcome.difference is not None:
            found.append(f"{outcome.label}: the replicas are not equal: {outcome.difference}")
        end = outcome.validation_loss
        learns = len(outcome.losses) < _FEWEST_STEPS or end <= results.initial_loss - _SMALLEST_FALL
        if not math.isfinite(end) or not learns:
            found.append(
                f"{outcome.label}: the loss did not come down: validation {results.initial_loss:.3f} before training, "
                f"{end:.3f} after"
            )
    return found
