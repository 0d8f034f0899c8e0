"""Owners: ranks to which whole parameters are dealt, by the operations that a step of each takes."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

import torch

from pycomm.optim.parameters import optimizer_parameters
from pycomm.training.reducer.buckets import Slot

_LOG = logging.getLogger("pycomm")
_UNEVEN = 1.5
"""Ratio of the costliest rank's steps to the mean from which the log says so."""


class Owners:
    """Owners of the parameters of ``optimizer``, the same on all ranks: the costliest are given first."""

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, size: int) -> None:
        self._rank = rank
        self._loads = [0.0] * size
        self._owners: dict[torch.Tensor, int] = {}
        for param in sorted(optimizer_parameters(optimizer), key=_cost_of, reverse=True):
            self._give(param)

    def _give(self, param: torch.Tensor) -> None:
        """Give ``param`` to the rank with the least to do."""
        rank = min(range(len(self._loads)), key=self._loads.__getitem__)
        self._owners[param] = rank
        self._loads[rank] += _cost_of(param)

    def of(self, param: torch.Tensor) -> int:
        """Return the rank that steps ``param``; one that is new gets an owner now, the same on all ranks."""
        if param not in self._owners:
            self._give(param)
        return self._owners[param]

    def is_own(self, param: torch.Tensor) -> bool:
        """Return whether this rank owns ``param``; of one that is new, which nobody steps yet, each rank does."""
        return self._owners.get(param, self._rank) == self._rank

    def own(self) -> list[torch.Tensor]:
        return [param for param, owner in self._owners.items() if owner == self._rank]

    def others(self) -> list[torch.Tensor]:
        return [param for param, owner in self._owners.items() if owner != self._rank]

    def shares_of(self, slots: Iterable[Slot], order: Sequence[int]) -> list[slice]:
        """Return the elements of each rank in a bucket of ``slots``, which are sorted by owners in ``order``."""
        numels = [0] * len(order)
        for slot in slots:
            numels[self.of(slot.param)] += slot.local.numel()
        shares, end = [slice(0, 0)] * len(order), 0
        for rank in order:
            shares[rank] = slice(end, end + numels[rank])
            end += numels[rank]
        return shares

    def stats(self) -> dict[int, dict[str, float]]:
        """Return what each rank steps: number of parameters, and share of the cost."""
        owners, total = list(self._owners.values()), sum(self._loads) or 1.0
        return {
            rank: {"parameters": owners.count(rank), "share": load / total} for rank, load in enumerate(self._loads)
        }

    def warn_if_uneven(self) -> None:
        """Say in the log if one rank has much more to do than the mean."""
        most, mean = max(self._loads), sum(self._loads) / len(self._loads)
        if most > _UNEVEN * mean:
            _LOG.warning(
                "the optimizer's step is shared out unevenly: rank %d has %.0f %% of it, as parameters are stepped as "
                "a whole; see stats()['step_shares']",
                self._loads.index(most),
                100.0 * most / sum(self._loads),
            )


def _cost_of(param: torch.Tensor) -> float:
    """Return the operations of a product by the smaller Gram matrix; of other than matrices, of elementwise steps."""
    if param.dim() < 2:
        return float(param.numel())
    return float(param.numel()) * min(param.shape[0], math.prod(param.shape[1:]))
