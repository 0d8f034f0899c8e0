"""Learning rate by step, the same in several benches."""

from __future__ import annotations

import math
from collections.abc import Callable

_RAMP_STEPS = 30
_FINAL_FRACTION = 0.1


def learning_rate_rule(steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: a linear ramp, then half a cosine down to a tenth."""
    ramp = max(1, min(_RAMP_STEPS, steps // 5))

    def factor(step: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
        return min(1.0, (step + 1) / ramp) * (_FINAL_FRACTION + (1 - _FINAL_FRACTION) * cosine)

    return factor
