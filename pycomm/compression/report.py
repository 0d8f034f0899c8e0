"""Report: facts about a bucket's gradients, sent inside the message that carries them.

For every parameter: was it used on this rank, and was it finite? A gathered message has a byte for each
parameter. A summed message has, for each parameter, the number of ranks that used it and, for each rank,
an element that says which of its parameters was the first that was not finite.

A fingerprint (pycomm/collectives/bucket.py) follows. In a gathered message each of its bits is a byte.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from pycomm.collectives.bucket import FINGERPRINT_BITS, FINGERPRINT_PLACES, differing_places, put_fingerprint

UNUSED, USED, NOT_FINITE = 0, 1, 2


class Report(Protocol):
    """Report of all ranks about one step."""

    def used(self) -> torch.Tensor:
        """Return, for each parameter, whether any rank had a gradient: bool."""

    def finite(self) -> torch.Tensor:
        """Return whether all gradients were finite: a 0-d bool."""

    def evidence(self) -> torch.Tensor:
        """Return what :meth:`sources_in` reads, equal on all ranks: the same shape and dtype in every step."""

    def sources_in(self, evidence: torch.Tensor) -> list[int]:
        """Return, for each rank, one more than the number of its first non-finite parameter, or 0. Waits for a GPU.

        Args:
            evidence: of this step or an earlier one; zeros: of none.
        """

    def differing(self) -> torch.Tensor:
        """Return, for each bit of the fingerprint, whether ranks differ in it: bool."""


def num_codes(num_params: int) -> int:
    """Return how many codes a rank's report has."""
    return num_params + FINGERPRINT_BITS


@dataclass(frozen=True)
class Told:
    """What this rank reports about a bucket's gradients.

    Attributes:
        unused: indices of the parameters that it has no gradient for.
        finite: for each parameter, whether what its gradient led to is finite: bool.
        fingerprint: ``None``, on all ranks or none: its bits are 0.
        is_used: for each parameter, whether it was used, if only the device knows: bool.
    """

    unused: tuple[int, ...]
    finite: torch.Tensor
    fingerprint: torch.Tensor | None
    is_used: torch.Tensor | None = None

    def write(self, codes: torch.Tensor, *, had_bits: bool = True) -> None:
        """Write it as ``codes``: uint8, one per parameter, then the bits of the fingerprint.

        ``had_bits``: whether there may be bits of an earlier fingerprint.
        """
        of_params, bits = codes[: len(self.finite)], codes[len(self.finite) :]
        torch.sub(_not_finite(codes.device), self.finite.view(torch.uint8), out=of_params)  # or USED
        if self.is_used is not None:
            of_params.mul_(self.is_used)
        for i in self.unused:
            codes[i].fill_(UNUSED)  # assigning a number would copy it from the host, and wait
        if self.fingerprint is not None:
            bits.copy_(self.fingerprint)
        elif had_bits:
            bits.zero_()


@functools.lru_cache(maxsize=8)
def _not_finite(device: torch.device) -> torch.Tensor:
    return torch.full((), NOT_FINITE, dtype=torch.uint8, device=device)


class GatheredReport:
    """Report out of gathered messages.

    Args:
        codes: uint8, a row for each rank.
    """

    def __init__(self, codes: torch.Tensor) -> None:
        self._codes, self._bits = codes[:, :-FINGERPRINT_BITS], codes[:, -FINGERPRINT_BITS:]

    def used(self) -> torch.Tensor:
        return (self._codes != UNUSED).any(dim=0)

    def finite(self) -> torch.Tensor:
        return (self._codes != NOT_FINITE).all()

    def evidence(self) -> torch.Tensor:
        return self._codes

    def sources_in(self, evidence: torch.Tensor) -> list[int]:
        return [row.index(NOT_FINITE) + 1 if NOT_FINITE in row else 0 for row in evidence.tolist()]

    def differing(self) -> torch.Tensor:
        return (self._bits != self._bits[0]).any(dim=0)


class SummedReport:
    """Report in an array that is summed over the ranks.

    Args:
        places: the :meth:`num_places` floating elements, part of that array, which hold it.
    """

    def __init__(self, places: torch.Tensor, num_params: int) -> None:
        self._places, self._used, rest = places, places[:num_params], places[num_params:]
        self._first, self._bits = rest[:-FINGERPRINT_PLACES], rest[-FINGERPRINT_PLACES:]
        # Number of parameters from each one on: the largest of those that are not finite says which is the first.
        self._numbers = torch.arange(num_params, 0, -1, dtype=places.dtype, device=places.device)
        self._none = torch.zeros((), dtype=places.dtype, device=places.device)

    @staticmethod
    def num_places(num_params: int, size: int) -> int:
        """Return how many elements the report takes among ``size`` ranks."""
        return num_params + size + FINGERPRINT_PLACES

    def fill(self, told: Told, rank: int) -> None:
        """Write this rank's part, before the sum."""
        self._places.zero_()
        if told.is_used is None:
            self._used.fill_(1.0)
        else:
            self._used.copy_(told.is_used)
        for i in told.unused:
            self._used[i].fill_(0.0)
        torch.amax(torch.where(told.finite, self._none, self._numbers), dim=0, out=self._first[rank])
        if told.fingerprint is not None:
            put_fingerprint(self._bits, told.fingerprint)

    def used(self) -> torch.Tensor:
        return self._used != 0

    def finite(self) -> torch.Tensor:
        return (self._first == 0).all()

    def evidence(self) -> torch.Tensor:
        return self._first

    def sources_in(self, evidence: torch.Tensor) -> list[int]:
        return [len(self._numbers) - int(number) + 1 if number else 0 for number in evidence.tolist()]

    def differing(self) -> torch.Tensor:
        return differing_places(self._bits)
