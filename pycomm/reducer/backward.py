"""When a backward pass begins, when all its gradients are there, and when it has really ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from pycomm.torch_internals import compiles_autograd, current_graph_task, current_node, queue_final_callback


class BackwardWatch:
    """Notices a pass by the gradients that it accumulates.

    ``on_begin`` is called before the first gradient of a pass, ``on_gradients`` when all are there, and
    ``on_end`` when ``backward()`` is about to return. All watches whose gradients one pass brought hear
    ``on_gradients`` before the first hears ``on_end``: whoever waits there for other ranks, which may
    have begun with another watch, keeps nobody from what they need.

    Autograd's final callbacks belong to a graph task. Reentrant checkpointing runs a nested task for
    every checkpointed piece, whose callback comes while the outer backward still runs; then the node
    that started it is still being evaluated. In that case a hook on that node asks the enclosing task
    for a callback, and so on outwards. A task that fails goes without calling back: that is how a pass
    that ended with an exception is known, and ``on_failure`` called.
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
        """A gradient has been accumulated, in whatever task is running."""
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
        """Whether a pass ended with an exception since this was asked last."""
        abandoned, self._abandoned = self._abandoned, False
        return abandoned

    def task_ended(self, task: int) -> None:
        enclosing = current_node()
        if enclosing is not None:
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
"""Those that have heard ``on_gradients``, and not yet ``on_end``."""


class _TaskEnd:
    """A final callback, which notices if it is dropped without having been called."""

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
