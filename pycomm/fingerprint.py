"""Fingerprint of a reduction: bits that must be equal on all ranks, and travel with the gradients.

In a sum, of any floating dtype, every bit has two places, and each rank adds 1 to one of them: if
neither sum is 0, ranks differ.
"""

from __future__ import annotations

import torch

FINGERPRINT_BITS = 64
FINGERPRINT_PLACES = 2 * FINGERPRINT_BITS
"""Number of elements that a fingerprint takes in a sum."""


def put_fingerprint(places: torch.Tensor, fingerprint: torch.Tensor | None) -> None:
    """Write this rank's part of a sum; ``None`` agrees with any fingerprint."""
    if fingerprint is None:
        places.zero_()
    else:
        places[:FINGERPRINT_BITS].copy_(fingerprint)
        places[FINGERPRINT_BITS:].copy_(~fingerprint)


def differing_places(places: torch.Tensor) -> torch.Tensor:
    """Return, for each bit, whether ranks differ in it, given the sum, or mean, over all ranks: bool."""
    there = places != 0
    return there[:FINGERPRINT_BITS] & there[FINGERPRINT_BITS:]
