"""Spans: which elements of each parameter a rank steps, where ranks share out the steps.

All ranks make the same table, from sizes alone: whole parameters, dealt by the operations that a step of each takes; or
equal parts of every bucket, which may cut a parameter.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence

import torch

from pycomm.optim.parameters import optimizer_parameters
from pycomm.training.reducer.buckets import Slot

_LOG = logging.getLogger("pycomm")
_ALIGNMENT = 64
"""Alignment of equal parts in elements, so that two ranks never write to the same cache line."""
_UNEVEN = 1.5
"""Ratio of the costliest rank's steps to the mean from which the log says so."""


class SpanTable:
    """Table of the spans that ranks step, the same on all ranks.

    Args:
        optimizer: its parameters are dealt, the costliest first, if ranks step whole ones.
        rank: this rank.
        order: ranks in the order in which their parts of a bucket lie.
        whole: whether ranks step whole parameters; otherwise equal parts of each bucket.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, order: Sequence[int], *, whole: bool) -> None:
        self._rank, self._order, self._is_whole = rank, list(order), whole
        self._loads = [0.0] * len(self._order)
        self._owners: dict[torch.Tensor, int] = {}
        for param in sorted(optimizer_parameters(optimizer), key=_cost_of, reverse=True) if whole else ():
            self._give(param)
        if whole and rank == 0:
            self._warn_if_uneven()

    def _give(self, param: torch.Tensor) -> None:
        """Give ``param`` to the rank with the least to do."""
        rank = min(range(len(self._loads)), key=self._loads.__getitem__)
        self._owners[param] = rank
        self._loads[rank] += _cost_of(param)

    def _owner_of(self, param: torch.Tensor) -> int:
        """Return the rank that steps ``param``; one that is new gets an owner now, the same on all ranks."""
        if param not in self._owners:
            self._give(param)
        return self._owners[param]

    def is_own(self, param: torch.Tensor) -> bool:
        """Return whether this rank owns ``param``; a new parameter, which nobody steps yet, belongs to every rank."""
        return self._owners.get(param, self._rank) == self._rank

    def own(self) -> list[torch.Tensor]:
        return [param for param, owner in self._owners.items() if owner == self._rank]

    def others(self) -> list[torch.Tensor]:
        return [param for param, owner in self._owners.items() if owner != self._rank]

    def sort_key(self, slot: Slot) -> int:
        """Return the sort key of ``slot`` in its bucket, in which each rank's whole parameters are adjacent."""
        return self._order.index(self._owner_of(slot.param)) if self._is_whole else 0

    def shares(self, slots: Sequence[Slot]) -> list[slice]:
        """Return the elements of each rank in a bucket of ``slots``, which are sorted by :meth:`sort_key`."""
        if not self._is_whole:
            return equal_shares(sum(slot.local.numel() for slot in slots), self._order)
        numels = [0] * len(self._order)
        for slot in slots:
            numels[self._owner_of(slot.param)] += slot.local.numel()
        return _slices([numels[rank] for rank in self._order], self._order)

    def stats(self) -> dict[int, dict[str, float]]:
        """Return what each rank steps: number of parameters, and share of the cost."""
        owners, total = list(self._owners.values()), sum(self._loads) or 1.0
        return {
            rank: {"parameters": owners.count(rank), "share": load / total} for rank, load in enumerate(self._loads)
        }

    def _warn_if_uneven(self) -> None:
        """Say in the log if one rank has much more to do than the mean."""
        most, mean = max(self._loads), sum(self._loads) / len(self._loads)
        if most > _UNEVEN * mean:
            _LOG.warning(
                "the optimizer's step is shared out unevenly: rank %d has %.0f %% of it, as parameters are stepped as "
                "a whole; see stats()['step_shares']",
                self._loads.index(most),
                100.0 * most / sum(self._loads),
            )


def equal_shares(num_elements: int, order: Sequence[int]) -> list[slice]:
    """Return the part of each rank, of equal size up to alignment, laid out in ``order``."""
    size, pieces = len(order), -(-num_elements // _ALIGNMENT)
    bounds = [min(pieces * place // size * _ALIGNMENT, num_elements) for place in range(size + 1)]
    return _slices([end - begin for begin, end in itertools.pairwise(bounds)], order)


def _slices(numels: Sequence[int], order: Sequence[int]) -> list[slice]:
    """Return each rank's slice, by rank, in memory that holds ``numels`` elements of each rank, in ``order``."""
    bounds = itertools.pairwise(itertools.accumulate(numels, initial=0))
    by_rank = dict(zip(order, itertools.starmap(slice, bounds), strict=True))
    return [by_rank[rank] for rank in range(len(order))]


def _cost_of(param: torch.Tensor) -> float:
    """Return the operations of a product by the smaller Gram matrix; for vectors and scalars, of elementwise steps."""
    if param.dim() < 2:
        return float(param.numel())
    return float(param.numel()) * min(param.shape[0], math.prod(param.shape[1:]))
