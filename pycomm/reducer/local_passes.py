"""Backward passes that are of this rank alone: what ``Reducer.paused`` lets through."""

from __future__ import annotations

import weakref
from weakref import WeakKeyDictionary

import torch

from pycomm.reducer.buckets import Slot
from pycomm.torch_internals import version_of


class LocalPasses:
    """Remembers the gradients that paused passes left, until they are gone.

    Attributes:
        depth: how many ``paused()`` are open.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._left: WeakKeyDictionary[Slot, tuple[weakref.ref[torch.Tensor], int]] = WeakKeyDictionary()

    def note(self, slot: Slot) -> None:
        """The gradient of ``slot`` has been accumulated by a pass that is not averaged."""
        grad = slot.param.grad
        assert grad is not None
        self._left[slot] = weakref.ref(grad), version_of(grad)

    def require_gone(self, why: str, firing: Slot | None = None) -> None:
        """RuntimeError if such a gradient still is in ``.grad``.

        Args:
            why: that matters now. firing: the parameter to whose gradient this pass has already added.
        """
        there = [slot for slot in self._left if self._may_be_there(slot, slot is firing)]
        if not there:
            self._left.clear()
            return
        # zero_grad(set_to_none=False), or grad.data.zero_(), has been called where all is 0; one look for all.
        grads = [slot.param.grad for slot in there if slot.param.grad is not None]
        nonzero = torch.stack([grad.count_nonzero() for grad in grads]).tolist()
        for slot, count in zip(there, nonzero, strict=True):
            if count > 0 or slot is firing:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} is still what a backward() inside reducer.paused() left, which is "
                    f"never averaged: {why}; optimizer.zero_grad() first"
                )
        self._left.clear()

    def _may_be_there(self, slot: Slot, added_to: bool) -> bool:
        reference, version = self._left[slot]
        grad = slot.param.grad
        if grad is None or reference() is not grad:
            return False
        return not added_to or version_of(grad) == version + 1  # else it was zeroed before this pass added to it
