"""What ranks tell each other about a bucket's gradients, inside the message that carries them.

For every parameter: was it used here, and was it finite? A message that is gathered carries a byte
for each parameter. One that is summed carries how many ranks used each parameter, and a place for
each rank with the number of its first parameter that was not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

UNUSED, USED, NOT_FINITE = 0, 1, 2


class Report(Protocol):
    """About one step, from all ranks."""

    def used(self) -> torch.Tensor:
        """For each parameter, whether any rank had a gradient: bool."""

    def finite(self) -> torch.Tensor:
        """Whether all gradients were finite: a 0-d bool."""

    def guilty(self) -> torch.Tensor:
        """For each rank, one more than the number of its first parameter that was not finite, or 0: int64."""


def codes_of(grads: Sequence[torch.Tensor | None], finite: torch.Tensor) -> torch.Tensor:
    """One uint8 per parameter, by whether there is a gradient and whether what it led to is ``finite``."""
    codes = torch.where(finite, USED, NOT_FINITE).to(torch.uint8)
    for i, grad in enumerate(grads):
        if grad is None:
            codes[i].fill_(UNUSED)  # assigning a number would copy it from the host, and wait
    return codes


def _first_not_finite(codes: torch.Tensor) -> torch.Tensor:
    bad = codes == NOT_FINITE
    return torch.where(bad.any(dim=-1), bad.int().argmax(dim=-1) + 1, 0)


class GatheredReport:
    """``codes``: uint8, a row for each rank."""

    def __init__(self, codes: torch.Tensor) -> None:
        self._codes = codes

    def used(self) -> torch.Tensor:
        return (self._codes != UNUSED).any(dim=0)

    def finite(self) -> torch.Tensor:
        return (self._codes != NOT_FINITE).all()

    def guilty(self) -> torch.Tensor:
        return _first_not_finite(self._codes)


class SummedReport:
    """``places``: floating, one for each parameter and then one for each rank; part of what is summed."""

    def __init__(self, places: torch.Tensor, num_params: int) -> None:
        self._used, self._guilty = places[:num_params], places[num_params:]

    @staticmethod
    def num_places(num_params: int, size: int) -> int:
        return num_params + size

    def fill(self, codes: torch.Tensor, rank: int) -> None:
        """This rank's part, before the sum."""
        self._used.copy_(codes != UNUSED)
        self._guilty.zero_()
        self._guilty[rank].copy_(_first_not_finite(codes))

    def used(self) -> torch.Tensor:
        return self._used != 0

    def finite(self) -> torch.Tensor:
        return (self._guilty == 0).all()

    def guilty(self) -> torch.Tensor:
        return self._guilty.long()
