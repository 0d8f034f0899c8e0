"""``PYCOMM_COMPARE=20``: the first gradients are averaged once more, plainly, and both averages compared."""

from __future__ import annotations

import logging
import math
import statistics
import time

import torch
import torch.distributed as dist

from pycomm.compression import NoCompression
from pycomm.compression.base import Scaling
from pycomm.descriptions import counted
from pycomm.training.reducer.buckets import SentBucket
from pycomm.training.reducer.settings import Options
from pycomm.training.reducer.statistics import Statistics

_LOG = logging.getLogger("pycomm")
_ROUNDINGS = 8
"""Largest difference that counts as rounding, in units of the dtype's and of the number of ranks."""


class SecondAverage:
    """Averages the gradients of the first ``steps`` reductions a second time, by ``group``'s own all-reduce.

    When that is done, rank 0's log says whether both averages agree, and the time of both. What a lossy compression
    leaves out is measured, as a part of one step's average and of the sum of all.

    Args:
        group: the user's process group, of the ranks that ``attach`` averages over.
    """

    def __init__(self, group: dist.ProcessGroup, steps: int, settings: Options) -> None:
        self._group, self._left, self._settings = group, steps, settings
        self._is_lossy = not isinstance(settings.compression, NoCompression)
        self._taken: dict[SentBucket, torch.Tensor] = {}
        self._sums: dict[SentBucket, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tally = _Tally()

    def take(self, sent: SentBucket, grads: list[torch.Tensor | None]) -> None:
        """Copy what this rank contributes to the average of a bucket."""
        if self._left == 0:
            return
        flat = torch.zeros(sent.bucket.num_elements, dtype=sent.bucket.dtype, device=sent.bucket.device)
        for place, grad in zip(sent.bucket.places_in(flat), grads, strict=True):
            if grad is not None:
                place.copy_(grad)
        self._taken[sent] = flat

    def compare(self, scaling: Scaling, factor: float, times: Statistics, *, has_averages: bool) -> None:
        """Average what was taken, and compare it with what has been handed out. Collective.

        Args:
            scaling: of this reduction.
            factor: of the averages, where ranks without a batch do not count.
            has_averages: whether there are averages; the same on all ranks.
        """
        if self._left == 0:
            return
        taken, self._taken = self._taken, {}
        waited = times.waits.seconds + times.phases.seconds["unpack"]
        waited, self._tally.waited = waited - self._tally.waited, waited
        if not has_averages:
            return
        averages, seconds = {}, 0.0
        for sent, flat in taken.items():
            local = float(torch.linalg.vector_norm(flat.double())) * scaling.weight
            _synchronize(flat)
            began = time.perf_counter()
            dist.all_reduce(flat.mul_(scaling.local), group=self._group)
            flat.mul_(factor / scaling.size if scaling.average else factor)
            _synchronize(flat)
            seconds += time.perf_counter() - began
            averages[sent] = flat, local
        if not all(bool(torch.isfinite(flat).all()) for flat, _ in averages.values()):
            return  # the same on all ranks; the step is skipped by whoever checks for it
        self._tally.count(waited, seconds)
        for sent, (flat, local) in averages.items():
            self._note(sent, flat[sent.bucket.own], local)
        self._tally.end_step()
        self._left -= 1
        if self._left == 0:
            self._tell()
            self._sums.clear()

    def _note(self, sent: SentBucket, plain: torch.Tensor, local: float) -> None:
        ours = sent.bucket.flat[sent.bucket.own].double()
        if not self._is_lossy:
            allowed = _ROUNDINGS * self._group.size() * torch.finfo(sent.bucket.dtype).eps * local
            self._tally.note(sent, ours, plain, allowed)
            return
        self._tally.note(sent, ours, plain, math.inf)
        sums = self._sums.setdefault(sent, (torch.zeros_like(ours), torch.zeros_like(ours)))
        sums[0].add_(ours)
        sums[1].add_(plain)

    def _tell(self) -> None:
        tally, name = self._tally, dist.get_backend(self._group)
        method = self._settings.compression
        what = f"PYCOMM_COMPARE: in {counted(tally.steps, 'step')}, the averages of pycomm and of {name} "
        if self._is_lossy:
            ours, plain = (torch.cat([sums[i] for sums in self._sums.values()]) for i in (0, 1))
            of_sum = float((ours - plain).norm() / plain.norm().clamp(min=torch.finfo(torch.float64).tiny))
            what += (
                f"differed by {_percent(tally.typical)} in a step, and in their sum by {_percent(of_sum)}: {method} "
                "sends less than the gradients"
            )
        elif tally.is_equal:
            what += "were equal to the bit"
        elif tally.worst is None:
            what += f"were equal to rounding (the difference was at most {tally.largest:.1e} of an average's length)"
        else:
            what += (
                f"DIFFERED, by {_percent(tally.largest)} and first in the bucket of {tally.worst!r}: one of the two is "
                "wrong, or gradients were changed while they were averaged"
            )
        times = "" if tally.is_on_gpu else tally.times(name)
        level = logging.WARNING if self._group.rank() == 0 else logging.DEBUG
        _LOG.log(level, "%s%s", what, times)


class _Tally:
    """What the comparisons have found.

    Attributes:
        waited: seconds that ``backward()`` has waited for pycomm and handed out its averages, in all.
        largest: largest relative difference of a bucket.
        worst: name of the first parameter of the first bucket that differs by more than rounding.
    """

    def __init__(self) -> None:
        self.steps, self.waited, self.largest = 0, 0.0, 0.0
        self.worst: str | None = None
        self.is_equal, self.is_on_gpu = True, False
        self._ours: list[float] = []
        self._plain: list[float] = []
        self._differences: list[float] = []
        self._squares = [0.0, 0.0]

    def count(self, ours: float, plain: float) -> None:
        """Count the seconds of a step."""
        self.steps += 1
        self._ours.append(ours)
        self._plain.append(plain)

    def note(self, sent: SentBucket, ours: torch.Tensor, plain: torch.Tensor, allowed: float) -> None:
        """Note the difference of two averages, whose length may be ``allowed``."""
        wide = plain.double()
        difference, length = float((ours - wide).norm()), float(wide.norm())
        self.is_equal &= difference == 0.0
        self.is_on_gpu |= sent.bucket.on_gpu
        self.largest = max(self.largest, difference / length if length else float(difference > 0.0))
        if not difference <= allowed and self.worst is None:
            self.worst = sent.bucket.names[0]
        self._squares[0] += difference**2
        self._squares[1] += length**2

    def end_step(self) -> None:
        difference, length = self._squares
        self._squares = [0.0, 0.0]
        self._differences.append(math.sqrt(difference / length) if length else 0.0)

    @property
    def typical(self) -> float:
        return statistics.median(self._differences)

    def times(self, name: str) -> str:
        ours, plain = (1e3 * statistics.median(seconds) for seconds in (self._ours, self._plain))
        return (
            f". backward() waited {ours:.3g} ms per step for pycomm; one plain all-reduce of each bucket took "
            f"{plain:.3g} ms by {name}, of which nothing was hidden"
        )


def _percent(part: float) -> str:
    return f"{100.0 * part:.3g} %"


def _synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
