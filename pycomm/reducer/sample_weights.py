"""Averages in which every sample, or token, counts the same, however the ranks' shares differ."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from pycomm.communicator import Communicator
from pycomm.worker import Work


class SampleWeights:
    """How many samples this rank's gradients are means of, pass by pass, and how much that is of all ranks'.

    Autograd adds up what the passes of a window bring. With g_p the gradient of pass p's mean loss over
    n_p samples, what is wanted is the sum of n_p g_p. So accumulated gradients are kept in units of the
    next pass's n: before that pass they are multiplied with n_before / n_next, which is 1 unless a batch
    is smaller than the one before. The window's gradient is then n_last times what has accumulated, and
    that over the sum of n over all passes and ranks, which takes one message of 8 bytes, is this rank's
    contribution.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._unit: float | None = None  # of what has accumulated, or will in the next pass
        self._passed = 0.0  # samples of this window's earlier passes
        self._window = 0.0  # of all of them, once the window is known to end
        self._here = 0.0  # the unit of what is sent
        self._sum: Work | None = None

    @property
    def in_use(self) -> bool:
        return self._unit is not None

    @property
    def nothing_here(self) -> bool:
        """Whether what has accumulated here counts for nothing."""
        return self.in_use and self._here == 0

    def set(self, num_samples: Any, num_passes: int) -> float:
        """The next pass's n; returns what accumulated gradients must be multiplied with first.

        Raises:
            TypeError, ValueError: not a number, or not usable at this point.
        """
        if isinstance(num_samples, bool) or not isinstance(num_samples, numbers.Real):
            raise TypeError(f"num_samples is {num_samples!r}, wanted a number")
        before, unit = self._unit, float(num_samples)
        if not (unit >= 0 and math.isfinite(unit)):
            raise ValueError(f"num_samples is {num_samples}, wanted a finite number that is not negative")
        if num_passes > 0 and before is None:
            raise ValueError("set_weight inside an accumulation window that began without it: call it before each pass")
        if num_passes > 0 and unit == 0:
            raise ValueError("num_samples is 0 inside an accumulation window: leave that backward() out, and flush()")
        self._unit = unit
        return 1.0 if num_passes == 0 or before == unit else (before or 0.0) / unit

    def note_pass(self) -> None:
        """A pass that is not its window's last has ended."""
        self._passed += self._unit or 0.0

    def share(self, passes_here: int, with_next: bool) -> None:
        """Begin to learn the sum over all ranks; the window ends with the next pass, or has ended. Collective.

        The message is the same in both cases: ranks may differ in how many passes their window has.
        """
        mine = self._passed + ((self._unit or 0.0) if with_next else 0.0)
        self._here = (self._unit or 0.0) if passes_here > 0 or with_next else 0.0
        self._window, self._passed = mine, 0.0
        sums = np.array([mine, passes_here + with_next])

        def job() -> tuple[float, float]:
            self._communicator.all_reduce(sums, "sum")
            return float(sums[0]), float(sums[1])

        self._sum = self._communicator.channel.submit(job)

    def mean_factor(self) -> float:
        """What has accumulated here, times this, is the gradient of the mean over this rank's own samples."""
        return self._here / self._window if self.in_use and self._window > 0 else 1.0

    def anybody(self) -> bool:
        """Whether any rank has had a pass in this window. Waits."""
        assert self._sum is not None
        _, passes = self._sum.wait()
        return bool(passes > 0)

    def relative(self) -> float:
        """How much what has accumulated here counts, where 1 is as much as the average rank's. Waits.

        Raises:
            ValueError: the weights of all ranks sum to zero; on every rank.
        """
        assert self._sum is not None
        total, _ = self._sum.wait()
        if total == 0:
            raise ValueError("the weights of this step sum to zero over all ranks: there is nothing to average")
        return float(self._communicator.size * self._here / total)
