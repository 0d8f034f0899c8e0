"""Loop index: counts that reveal a rank that left out a batch, so that ranks would average different batches.

A rank that leaves out a batch (``continue``, because the loss is NaN) has a forward without a backward, or calls
``zero_grad`` twice in a row. Both are counted between reductions, and the counts travel with the gradients.

The number of forwards itself is not compared: it depends on the length of an episode or a sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol

import torch

_MOST_TENSORS = 16
"""Most tensors of an output that are hooked."""


class _Forward:
    """Hook of the nodes of a forward's output, which notes whether backward has reached one of them."""

    __slots__ = ("used",)

    def __init__(self) -> None:
        self.used = False

    def __call__(self, _: Any) -> None:
        self.used = True


class Gradient(Protocol):
    """Gradient of a parameter, to which backward has added ``fired`` times in this pass."""

    @property
    def owner(self) -> Any: ...
    @property
    def fired(self) -> int: ...
    def holds_average(self) -> bool: ...
    def grad_version(self) -> int: ...


class LoopIndex:
    """Counts of one rank since its last reduction.

    Attributes:
        num_zero_grads: number of calls of ``optimizer.zero_grad()``.
        has_paused: whether there was a pass of this rank alone, around which it may have called ``zero_grad`` too.
        accumulated: whether backward has added to gradients that the last step has used already.
        num_cleared: number of passes whose gradients were cleared before their accumulation window had ended.
    """

    def __init__(self) -> None:
        self._forwards: dict[str, list[_Forward]] = {}  # by the called module's name
        self._stepped: tuple[Gradient, int] | None = None  # a gradient that the last step has used, with its version
        self.num_zero_grads = self.num_cleared = 0
        self.accumulated = self.has_paused = False

    def note_step(self, slot: Gradient) -> None:
        """Note that the optimizer has used the gradient of ``slot``, one for all: they are cleared together."""
        has_average = slot.owner.grad is not None and slot.holds_average()
        self._stepped = (slot, slot.grad_version()) if has_average else None

    def note_gradient(self, slot: Gradient) -> None:
        """Note that backward has added to the gradient of ``slot``, which has been counted."""
        if self._stepped is not None and self._stepped[0] is slot and slot.owner.grad is not None:
            kept = slot.holds_average() and slot.grad_version() == self._stepped[1] + slot.fired
            self.accumulated |= kept and slot.fired > 0

    def note_forward(self, output: Any, called: str = "") -> None:
        """Note a forward for training of the part ``called``, whose ``output`` is a tensor, or containers of them."""
        forward = _Forward()
        is_hooked = False
        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(forward)
                is_hooked = True
        if is_hooked:
            self._forwards.setdefault(called, []).append(forward)

    @property
    def has_forwards(self) -> bool:
        return bool(self._forwards)

    @property
    def has_used(self) -> bool:
        """Return whether gradients of a forward have been computed since the last reduction."""
        return any(forward.used for forwards in self._forwards.values() for forward in forwards)

    @property
    def num_unused(self) -> int:
        """Number of forwards that no backward has come to.

        If parts of a model are called, one may go unused in a step; a batch that is left out leaves all of them unused.
        """
        unused = [sum(not forward.used for forward in forwards) for forwards in self._forwards.values()]
        return min(unused, default=0)

    @property
    def num_calls(self) -> int:
        """Number of calls of ``zero_grad`` that ranks compare: 1 also for none, as not every loop calls it."""
        return 1 if self.has_paused else max(self.num_zero_grads, 1)

    def counts(self) -> tuple[int, int, bool, int]:
        """Return what ranks compare: unused forwards, calls of ``zero_grad``, ``accumulated`` and ``num_cleared``."""
        return self.num_unused, self.num_calls, self.accumulated, self.num_cleared

    def restart(self) -> None:
        """Count from zero: gradients have been averaged."""
        self._forwards.clear()
        self._stepped = None
        self.num_zero_grads, self.num_cleared, self.accumulated, self.has_paused = 0, 0, False, False


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the first tensors of ``output``: of tuples, lists, dicts and dataclasses."""
    left, found = [output], 0
    while left and found < _MOST_TENSORS:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            found += 1
            yield value
        elif isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (tuple, list)):
            left.extend(value[:_MOST_TENSORS])
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            left.extend(vars(value).values())
