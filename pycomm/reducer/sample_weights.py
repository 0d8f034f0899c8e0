"""Weights for averages in which every sample or token counts the same, however many each rank has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pycomm.checks import bounded
from pycomm.communicator import Communicator
from pycomm.worker import Work


class SampleWeights:
    """Number of samples behind this rank's gradients, pass by pass, and their share of all ranks' samples.

    Autograd adds up the gradients of a window's passes. With g_p the gradient of pass p's mean loss over
    n_p samples, the sum of n_p g_p is wanted. Accumulated gradients are therefore kept in units of the
    next pass's n: before that pass they are multiplied by n_before / n_next, which is 1 unless the batch
    size changes. The window's gradient is then n_last times the accumulated gradient. Divided by the sum
    of n over all passes and ranks, which takes one message of 16 bytes, it is this rank's contribution.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._unit: float | None = None  # n of the accumulated gradients, or of the next pass if there are none
        self._passed = 0.0  # samples of this window's earlier passes
        self._window = 0.0  # samples of all its passes, once it is known to end
        self._sent_unit = 0.0  # n of the gradients that are sent
        self._mine = (0.0, 0)  # samples and passes of the window, as they are summed
        self._sum: Work | None = None

    @property
    def in_use(self) -> bool:
        """Return whether weights have been set at all."""
        return self._unit is not None

    @property
    def is_zero(self) -> bool:
        """Return whether the gradients accumulated on this rank have weight zero."""
        return self.in_use and self._sent_unit == 0

    def set(self, num_samples: Any, num_passes: int) -> float:
        """Set n of the next pass; return the factor by which accumulated gradients must be multiplied first.

        Args:
            num_samples: finite and not negative.
            num_passes: number of passes that the open window has had.

        Raises:
            TypeError, ValueError: ``num_samples`` is not such a number, or not allowed at this point.
        """
        wanted = "a finite number that is not negative"
        before, unit = self._unit, bounded("num_samples", num_samples, wanted, lambda n: 0 <= n < math.inf)
        if num_passes > 0 and before is None:
            raise ValueError("set_weight inside an accumulation window that began without it: call it before each pass")
        if num_passes > 0 and unit == 0:
            raise ValueError("num_samples is 0 inside an accumulation window: leave that backward() out, and flush()")
        self._unit = unit
        return 1.0 if num_passes == 0 or before == unit else (before or 0.0) / unit

    def note_pass(self) -> None:
        """Note that a pass has ended that is not the last of its window."""
        self._passed += self._unit or 0.0

    def forget_passes(self) -> None:
        """Forget the passes of a window whose samples were not to count."""
        self._passed = 0.0

    def start_sum(self, num_passes: int, with_next: bool) -> None:
        """Begin to sum the samples of the window over all ranks. Collective.

        The message is the same whether the window ends with the next pass or has ended, as the ranks may
        differ in their numbers of passes.

        Args:
            num_passes: number of passes that have ended on this rank.
            with_next: whether the next pass belongs to the window.
        """
        mine = self._passed + ((self._unit or 0.0) if with_next else 0.0)
        self._sent_unit = (self._unit or 0.0) if num_passes > 0 or with_next else 0.0
        self._window, self._passed = mine, 0.0
        self._mine = mine, num_passes + with_next
        self.sum_again()

    def sum_again(self) -> None:
        """Begin to sum the same samples over the ranks that there are now. Collective."""
        sums = np.array(self._mine, np.float64)

        def job() -> tuple[float, float]:
            self._communicator.all_reduce(sums, "sum")
            return float(sums[0]), float(sums[1])

        self._sum = self._communicator.channel.submit(job)

    def mean_factor(self) -> float:
        """Return the factor that turns the accumulated gradient into that of the mean over this rank's own samples."""
        return self._sent_unit / self._window if self.in_use and self._window > 0 else 1.0

    def any_passes(self) -> bool:
        """Return whether any rank has had a pass in this window. Waits for the sum."""
        assert self._sum is not None
        _, passes = self._sum.wait()
        return bool(passes > 0)

    def relative(self) -> float:
        """Return the weight of the gradients accumulated here relative to the ranks' mean weight. Waits for the sum.

        Multiplied by it, they are averaged correctly by a plain mean over the ranks.

        Raises:
            ValueError: the weights of all ranks sum to zero; on every rank.
        """
        assert self._sum is not None
        total, _ = self._sum.wait()
        if total == 0:
            raise ValueError("the weights of this step sum to zero over all ranks: there is nothing to average")
        return float(self._communicator.size * self._sent_unit / total)
