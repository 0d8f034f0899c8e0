"""Detection of a backward pass: its beginning, the arrival of its last gradient, and its real end."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from pycomm.torch_internals import (
    calls_hooks_of_running_nodes,
    compiles_autograd,
    current_graph_task,
    current_node,
    queue_final_callback,
)


class BackwardWatch:
    """Watch that detects backward passes by the gradients they accumulate.

    ``on_begin`` is called before the first gradient of a pass, ``on_gradients`` when all have arrived, and
    ``on_end`` when ``backward()`` is about to return. If one pass produces gradients for several watches,
    ``on_gradients`` is called on all of them before ``on_end`` is called on the first: ``on_end`` may wait
    for other ranks, which may have reached another watch first and need what that watch sends.

    Autograd's final callbacks belong to a graph task. Reentrant checkpointing runs a nested task for
    every checkpointed piece, whose callback is called while the outer backward still runs; the node that
    started the nested task is then still being evaluated. In that case a hook on that node requests a
    callback from the enclosing task, and so on outwards. A task that fails is dropped without its
    callback: this is how a pass that ended with an exception is detected, and ``on_failure`` called.
    """

    def __init__(
        self,
        on_begin: Callable[[], None],
        on_gradients: Callable[[], None],
        on_end: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._on_begin, self._on_gradients, self._on_end = on_begin, on_gradients, on_end
        self._on_failure = on_failure
        self._tasks: set[int] = set()
        self._active = False
        self._abandoned = False

    def touch(self, *_: object) -> None:
        """Note that a gradient has been accumulated, in whichever graph task is running."""
        if not self._active:
            _refuse_compiled_autograd()
        task = current_graph_task()
        if task in self._tasks:
            return
        if not self._active:
            self._on_begin()
            self._active = True
            _active.add(self)
        self._tasks.add(task)
        queue_final_callback(_TaskEnd(self, task))

    def abandoned(self) -> bool:
        """Return whether a pass has ended with an exception since the last call."""
        abandoned, self._abandoned = self._abandoned, False
        return abandoned

    def task_ended(self, task: int) -> None:
        """Handle the final callback of a graph task."""
        enclosing = current_node()
        if enclosing is not None:
            if not calls_hooks_of_running_nodes():
                raise RuntimeError(
                    "reentrant checkpointing, with which this torch does not tell when backward() has ended: call "
                    "checkpoint(..., use_reentrant=False), or use a newer torch"
                )
            enclosing.register_hook(self.touch)
            return
        for watch in list(_active):
            if task in watch._tasks:
                watch._reset()
                watch._on_gradients()
                _ending.add(watch)
        if self in _ending:
            _ending.discard(self)
            self._on_end()

    def task_failed(self) -> None:
        """Handle a graph task that was dropped without its final callback."""
        if self._active:
            self._reset()
            self._abandoned = True
            self._on_failure()
        _ending.discard(self)

    def _reset(self) -> None:
        self._tasks.clear()
        self._active = False
        _active.discard(self)


_active: weakref.WeakSet[BackwardWatch] = weakref.WeakSet()
_ending: weakref.WeakSet[BackwardWatch] = weakref.WeakSet()
"""Watches on which ``on_gradients`` has been called, and ``on_end`` not yet."""


class _TaskEnd:
    """Final callback of a graph task; reports a failure if it is dropped without having been called."""

    def __init__(self, watch: BackwardWatch, task: int) -> None:
        self._watch = weakref.ref(watch)
        self._task = task
        self._called = False

    def __call__(self) -> None:
        self._called = True
        watch = self._watch()
        if watch is not None:
            watch.task_ended(self._task)

    def __del__(self) -> None:
        watch = None if self._called else self._watch()
        if watch is not None:
            watch.task_failed()


def _refuse_compiled_autograd() -> None:
    if compiles_autograd():
        raise RuntimeError(
            "compiled autograd does not call pycomm's hooks as backward() goes: leave it off "
            "(torch._dynamo.config.compiled_autograd = False); torch.compile of the model is fine"
        )
