"""End of a backward pass, whether it succeeds or not."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from pycomm.torch_internals import queue_final_callback


class Watcher(Protocol):
    """Object that wants to know how a backward pass ends."""

    def fail(self) -> None:
        """Note that the pass has ended with an exception."""


class _PassEnd:
    """Final callback of a backward pass; autograd drops it without a call if the pass ends with an exception."""

    def __init__(self, watcher: Watcher, action: Callable[[], None] | None) -> None:
        self._watcher = weakref.ref(watcher)
        self._action = action
        self._called = False

    def __call__(self) -> None:
        self._called = True
        action, self._action = self._action, None
        if action is not None:
            action()

    def __del__(self) -> None:
        watcher = None if self._called else self._watcher()
        if watcher is not None:
            watcher.fail()


def at_pass_end(watcher: Watcher, action: Callable[[], None] | None = None) -> None:
    """Call ``action`` at the end of the running backward pass; ``watcher.fail()`` if that ends with an exception."""
    queue_final_callback(_PassEnd(watcher, action))
