"""Backward passes that are of this rank alone: what ``Reducer.paused`` lets through."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from pycomm.optim.assembly import Slot


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
        self._left[slot] = weakref.ref(grad), grad._version

    def require_gone(self, why: str, firing: Slot | None = None) -> None:
        """RuntimeError if such a gradient still is in ``.grad``.

        Args:
            why: that matters now. firing: the parameter to whose gradient this pass has already added.
        """
        for slot in list(self._left):
            if self._is_there(slot, slot is firing):
                raise RuntimeError(
                    f"the gradient of {slot.name!r} is still what a backward() inside reducer.paused() left, which is "
                    f"never averaged: {why}; optimizer.zero_grad() first"
                )
        self._left.clear()

    def forget(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self._left.pop(slot, None)

    def _is_there(self, slot: Slot, added_to: bool) -> bool:
        reference, version = self._left[slot]
        grad = slot.param.grad
        if grad is None or reference() is not grad:
            return False
        if grad._version == version + added_to:
            return True
        # Written to since: by zero_grad(set_to_none=False), or by something else.
        return not added_to and bool(grad.count_nonzero())
