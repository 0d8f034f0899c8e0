"""Verdict on a step: whether it was finite on every rank, so that state may change; and the counts of both kinds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycomm.compression.base import Exchange, Flag


class StepCounts:
    """Counts of the steps that changed state, and of those that were not finite.

    Attributes:
        committed, nonfinite: 0-d int64 tensors on the gradients' device.
    """

    def __init__(self, device: torch.device) -> None:
        self.committed = torch.zeros((), dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def next_number(self) -> int | torch.Tensor:
        """Number of the next step, as :class:`pycomm.compression.base.Scaling` wants it."""
        # A copy on a GPU: the count may be incremented before the GPU has read it for this step.
        return self.committed.clone() if self.committed.is_cuda else int(self.committed)

    def count(self, finite: Flag) -> None:
        """Count one more step."""
        self.committed += torch.as_tensor(finite, device=self.committed.device)
        self.nonfinite += ~torch.as_tensor(finite, device=self.committed.device)


def all_finite(exchanges: Sequence[Exchange]) -> Flag:
    """Return whether all that was received is finite; the same on all ranks, since all have received the same bits."""
    flags = [torch.as_tensor(exchange.finite()) for exchange in exchanges]
    finite = torch.stack(flags).all()
    return finite if finite.is_cuda else bool(finite)
