"""From what the ranks reported to the numbers that are shown."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pycomm.cli.demo.messages import Outcome, Results
from pycomm.cli.demo.settings import TURN_STEPS, WARM_UP_STEPS

_SMALLEST_FALL = 0.05  # nats per byte; less is not learning
_MOST_SMOOTHING = 20  # steps

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """One run in numbers: medians over the steps after the warm-up."""

    label: str
    validation_loss: float
    step_seconds: float
    wait_seconds: float
    reported_wait_seconds: float
    bytes_per_step: float


@dataclass(frozen=True)
class Ratio:
    """A step of one run as a multiple of another's: of the medians, and the quartiles over the turns."""

    value: float
    low: float
    high: float

    def is_clearly_below_one(self) -> bool:
        return max(self.value, self.high) < 1.0

    def is_clearly_above_one(self) -> bool:
        return min(self.value, self.low) > 1.0


def figures_of(outcome: Outcome) -> Figures:
    return Figures(
        label=outcome.label,
        validation_loss=outcome.validation_loss,
        step_seconds=_median(outcome.seconds),
        wait_seconds=_median(outcome.waits),
        reported_wait_seconds=_median(outcome.reported_waits),
        bytes_per_step=outcome.bytes_sent[-1] / len(outcome.bytes_sent),
    )


def step_ratio(run: Outcome, base: Outcome) -> Ratio:
    """Compared turn by turn, as turns that follow each other meet the same weather."""
    by_turn = _turn_medians(run) / _turn_medians(base)
    low, high = np.quantile(by_turn, (0.25, 0.75))
    return Ratio(_median(run.seconds) / _median(base.seconds), float(low), float(high))


def _turn_medians(outcome: Outcome) -> Array:
    turns = [outcome.seconds[i : i + TURN_STEPS] for i in range(0, len(outcome.seconds), TURN_STEPS)]
    turns[0] = turns[0][WARM_UP_STEPS:]
    return np.array([np.median(turn) for turn in turns])


def _median(values: list[float]) -> float:
    return float(np.median(values[WARM_UP_STEPS:]))


def smoothed(outcome: Outcome) -> Array:
    """The training loss of every step as the mean over it and those before it, up to twenty."""
    sums = np.concatenate([[0.0], np.cumsum(outcome.losses)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(0, ends - _MOST_SMOOTHING)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def problems(results: Results) -> list[str]:
    """What must not be: replicas that differ, losses that did not come down."""
    found = []
    for outcome in results.outcomes:
        if outcome.difference is not None:
            found.append(f"{outcome.label}: the replicas are not equal: {outcome.difference}")
        end = outcome.validation_loss
        if not math.isfinite(end) or end > results.initial_loss - _SMALLEST_FALL:
            found.append(
                f"{outcome.label}: the loss did not come down: validation {results.initial_loss:.3f} before training, "
                f"{end:.3f} after"
            )
    return found
