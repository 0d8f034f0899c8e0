"""Report: facts about a bucket's gradients, sent inside the message that carries them.

For every parameter: was it used on this rank, and was it finite? A gathered message has a byte for each
parameter. A summed message has, for each parameter, the number of ranks that used it and, for each rank,
an element with the number of its first parameter that was not finite.

A fingerprint (pycomm/collectives/bucket.py) follows. In a gathered message each of its bits is a byte.
"""

from __future__ import annotations

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

    def nonfinite_sources(self) -> torch.Tensor:
        """Return, for each rank, one more than the number of its first non-finite parameter, or 0: int64."""

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
        fingerprint: ``None`` on all ranks alike: its bits are 0.
        is_used: for each parameter, whether it was used, if only the device knows: bool.
    """

    unused: tuple[int, ...]
    finite: torch.Tensor
    fingerprint: torch.Tensor | None
    is_used: torch.Tensor | None = None

    def codes(self) -> torch.Tensor:
        """Return it as codes: uint8, one per parameter, then the bits of the fingerprint."""
        num_params = len(self.finite)
        codes = torch.zeros(num_codes(num_params), dtype=torch.uint8, device=self.finite.device)
        codes[:num_params] = torch.where(self.finite, USED, NOT_FINITE)
        if self.is_used is not None:
            codes[:num_params] *= self.is_used
        for i in self.unused:
            codes[i].fill_(UNUSED)  # assigning a number would copy it from the host, and wait
        if self.fingerprint is not None:
            codes[num_params:] = self.fingerprint
        return codes


def _first_not_finite(codes: torch.Tensor) -> torch.Tensor:
    bad = codes == NOT_FINITE
    return torch.where(bad.any(dim=-1), bad.int().argmax(dim=-1) + 1, 0)


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

    def nonfinite_sources(self) -> torch.Tensor:
        return _first_not_finite(self._codes)

    def differing(self) -> torch.Tensor:
        return (self._bits != self._bits[0]).any(dim=0)


class SummedReport:
    """Report in an array that is summed over the ranks.

    Args:
        places: the :meth:`num_places` floating elements, part of that array, which hold it.
    """

    def __init__(self, places: torch.Tensor, num_params: int) -> None:
        self._used, rest = places[:num_params], places[num_params:]
        self._nonfinite_sources, self._bits = rest[:-FINGERPRINT_PLACES], rest[-FINGERPRINT_PLACES:]

    @staticmethod
    def num_places(num_params: int, size: int) -> int:
        """Return how many elements the report takes among ``size`` ranks."""
        return num_params + size + FINGERPRINT_PLACES

    def fill(self, codes: torch.Tensor, rank: int) -> None:
        """Write this rank's part, before the sum."""
        of_params, bits = codes[:-FINGERPRINT_BITS], codes[-FINGERPRINT_BITS:]
        self._used.copy_(of_params != UNUSED)
        self._nonfinite_sources.zero_()
        self._nonfinite_sources[rank].copy_(_first_not_finite(of_params))
        put_fingerprint(self._bits, bits != 0)

    def used(self) -> torch.Tensor:
        return self._used != 0

    def finite(self) -> torch.Tensor:
        return (self._nonfinite_sources == 0).all()

    def nonfinite_sources(self) -> torch.Tensor:
        return self._nonfinite_sources.long()

    def differing(self) -> torch.Tensor:
        return differing_places(self._bits)
