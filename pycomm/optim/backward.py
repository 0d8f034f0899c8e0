"""When a backward pass begins and when it has really ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable


class BackwardWatch:
    """Calls ``on_begin`` before the first gradient of a pass and ``on_end`` when ``backward()`` is about to return.

    Autograd's final callbacks belong to a graph task. Reentrant checkpointing runs a nested task for
    every checkpointed piece, whose callback comes while the outer backward still runs; then the node
    that started it is still being evaluated. In that case a hook on that node asks the enclosing task
    for a callback, and so on outwards.
    """

    def __init__(self, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._tasks: set[int] = set()
        self._active = False

    def touch(self, *_: object) -> None:
        """A gradient has been accumulated, in whatever task is running."""
        task = torch._C._current_graph_task_id()
        if task in self._tasks:
            return
        if not self._active:
            self._active = True
            self._on_begin()
        self._tasks.add(task)
        Variable._execution_engine.queue_callback(self._task_ended)

    def abandoned(self) -> bool:
        """Whether the last pass ended with an exception; forgets about it."""
        if not self._active or torch._C._current_graph_task_id() != -1:
            return False
        self._reset()
        return True

    def _task_ended(self) -> None:
        enclosing: Any = torch._C._current_autograd_node()
        if enclosing is not None:
            enclosing.register_hook(self.touch)
            return
        self._reset()
        self._on_end()

    def _reset(self) -> None:
        self._tasks.clear()
        self._active = False
