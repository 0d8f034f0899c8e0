"""Verdicts on whether the averaged gradients of a step are finite, which all ranks must share.

Ranks that average the same gradients receive the same bits, and so agree without a message. Parts of DTensors are
averaged apart: the ranks that hold them tell each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pycomm.optim.loss_scaler import LossScaler
from pycomm.optim.shards import Shards
from pycomm.reducer.buckets import BucketInFlight
from pycomm.reducer.partition import StepPartition
from pycomm.reducer.settings import Settings


def needs_verdict(flights: Sequence[BucketInFlight], shards: Shards, settings: Settings) -> bool:
    """Return whether it has to be known, before gradients are handed out, if the step is finite."""
    # "auto" may choose differently for other parts of DTensors, whose ranks wait for this one's verdict.
    transactional = bool(shards) and settings.compression.transactional
    return transactional or any(flight.exchange.transactional for flight in flights)


def all_finite(flights: Sequence[BucketInFlight], shards: Shards) -> torch.Tensor:
    """Return whether all that ``flights`` received is finite, on all ranks of ``shards``: 0-d bool.

    Does not wait for a GPU. Collective over the ranks of ``shards``, if there are any.
    """
    flags = [torch.as_tensor(flight.exchange.finite()) for flight in flights]
    finite = torch.stack(flags).all() if flags else torch.tensor(True)
    return shards.all_agree(finite) if shards else finite


def spread_failure_of_parts(flights: Sequence[BucketInFlight], partition: StepPartition) -> str | None:
    """Make all gradients NaN, on all ranks, if a rank's own part of the averages is not finite; return its name.

    Every rank, and a loss scaler there, so decides the same about the step. Collective only where a rank had gradients
    so large that their sum may not be finite, which all know from the flags.
    """
    if all(bool(flight.exchange.finite()) for flight in flights):
        return None
    partition.require_reduced()
    parts = [(slot.name, part) for f in flights for slot, part in zip(f.slots, f.bucket.own_parts(), strict=True)]
    found = next((i for i, (_, part) in enumerate(parts) if not bool(torch.isfinite(part).all())), len(parts))
    first = partition.first_of(found)
    if first == len(parts):
        return None
    for flight in flights:
        flight.bucket.flat.fill_(math.nan)
    return parts[first][0]


def spread_failure(flights: Sequence[BucketInFlight], shards: Shards, loss_scaler: Any) -> None:
    """Make gradients that have been handed out NaN if another rank's parts of DTensors are not finite.

    torch's GradScaler looks at each rank's own gradients, and would step on some ranks only. Does nothing without a
    scaler, for :class:`pycomm.LossScaler`, which asks :func:`all_finite`, and without DTensors. Otherwise it is
    collective over the ranks of ``shards``, and waits for a GPU, as GradScaler is about to do.
    """
    if not shards or loss_scaler is None or isinstance(loss_scaler, LossScaler):
        return
    if not bool(all_finite(flights, shards)):
        for flight in flights:
            flight.bucket.flat.fill_(math.nan)
