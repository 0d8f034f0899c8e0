"""Backward passes of this rank alone, inside ``Reducer.paused``."""

from __future__ import annotations

import weakref
from weakref import WeakKeyDictionary

import torch

from pycomm.reducer.buckets import Slot


class LocalPasses:
    """Record of the gradients that paused passes left in ``.grad``, kept until they are gone.

    Attributes:
        depth: number of ``paused()`` contexts that are open.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._left: WeakKeyDictionary[Slot, tuple[weakref.ref[torch.Tensor], int]] = WeakKeyDictionary()

    def note(self, slot: Slot) -> None:
        """Note that a pass that is not averaged has accumulated the gradient of ``slot``."""
        grad = slot.owner.grad
        assert grad is not None
        self._left[slot] = weakref.ref(grad), slot.grad_version()

    def require_gone(self, why: str, firing: Slot | None = None) -> None:
        """Raise RuntimeError if such a gradient is still in ``.grad``.

        Args:
            why: reason for which it must be gone now, for the message.
            firing: slot to whose gradient the current pass has already added.
        """
        suspects = [slot for slot in self._left if self._may_be_there(slot, slot is firing)]
        if not suspects:
            self._left.clear()
            return
        # A gradient that is all zeros was cleared by zero_grad(set_to_none=False) or grad.data.zero_(). The host
        # waits once for all counts.
        grads = [grad for slot in suspects if (grad := slot.owner.grad) is not None]
        nonzero = torch.stack([grad.count_nonzero() for grad in grads]).tolist()
        for slot, count in zip(suspects, nonzero, strict=True):
            if count > 0 or slot is firing:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} is still what a backward() inside reducer.paused() left, which is "
                    f"never averaged: {why}; call optimizer.zero_grad() first"
                )
        self._left.clear()

    def _may_be_there(self, slot: Slot, added_to: bool) -> bool:
        reference, version = self._left[slot]
        grad = slot.owner.grad
        if grad is None or reference() is not grad:
            return False
        return not added_to or slot.grad_version() == version + 1  # else it was zeroed before this pass added to it
