"""Hooks of autograd and of the optimizer's step. None of them keeps the rest of pycomm alive."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pycomm.collectives.gradients import GradientCounter, PassGate, handler_of
from pycomm.descriptions import first_names
from pycomm.optim.attached import is_covered
from pycomm.optim.module_hooks import weakly
from pycomm.torch_internals import (
    accumulation_hooks,
    calls_hooks_of_running_nodes,
    compiles_autograd,
    current_graph_task,
    current_node,
    queue_final_callback,
)


class Uncovered:
    """Watch over the parameters of ``module`` that no Reducer covers; warns once if one of them gets a gradient.

    Args:
        covers: returns whether the new Reducer averages or ignores a parameter.
    """

    def __init__(self, module: torch.nn.Module, covers: Callable[[torch.Tensor], bool]) -> None:
        self._covers = covers
        self._names: list[str] = []
        self._handles: dict[int, Any] = {}  # by id of the parameter
        self.watch(module)

    def watch(self, module: torch.nn.Module) -> None:
        """Hook the trainable parameters that are neither covered nor hooked yet."""
        for name, param in module.named_parameters():
            is_trained = param.requires_grad and param.is_leaf
            if is_trained and id(param) not in self._handles and not self._is_covered(param):
                register: Any = param.register_post_accumulate_grad_hook
                self._handles[id(param)] = register(functools.partial(weakly(self.note), name))

    def note(self, name: str, param: torch.Tensor) -> None:
        """Note that ``param`` has got a gradient."""
        if self._is_covered(param):  # by an attach that came later
            self._handles[id(param)].remove()
        else:
            self._names.append(name)

    def _is_covered(self, param: torch.Tensor) -> bool:
        return self._covers(param) or is_covered(param)

    def warn(self) -> None:
        """Warn of the parameters noted so far; only once. Called at the end of a pass."""
        if not self._names:
            return
        shown = first_names(list(dict.fromkeys(self._names)))
        self.close()
        warnings.warn(
            "these parameters of the module get gradients, but are no parameters of the optimizer, and nothing "
            f"averages them: {shown}. Anything computed from them differs between the ranks, for example "
            "clip_grad_norm_(model.parameters()). Attach the optimizer that has them too, or write "
            "tuning=pycomm.Tuning(all_parameters=True), or requires_grad_(False)",
            RuntimeWarning,
            stacklevel=2,
        )

    def close(self) -> None:
        """Remove all hooks, and forget what was noted."""
        for handle in self._handles.values():
            handle.remove()
        self._names.clear()


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
    callback, which shows that the pass has ended with an exception; ``on_failure`` is then called.
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
        FinalCallback(functools.partial(weakly(self.task_ended), task), self.task_failed)

    def take_abandoned(self) -> bool:
        """Return whether a pass has ended with an exception since the last call."""
        abandoned, self._abandoned = self._abandoned, False
        return abandoned

    def task_ended(self, task: int) -> None:
        """Handle the final callback of a graph task."""
        enclosing = current_node()
        if enclosing is not None:
            if not calls_hooks_of_running_nodes():
                raise RuntimeError(
                    "reentrant checkpointing, in which this version of torch does not report the end of backward(): "
                    "call checkpoint(..., use_reentrant=False), or use a newer torch"
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
"""Watches between their calls of ``on_gradients`` and ``on_end``."""


class FinalCallback:
    """Final callback of the graph task that is running. Autograd drops it without a call if the task fails.

    Args:
        failed: called if the task fails; a bound method, held weakly.
    """

    def __init__(self, action: Callable[[], None], failed: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._failed = weakref.WeakMethod(failed)
        queue_final_callback(self)

    def __call__(self) -> None:
        action, self._action = self._action, None
        assert action is not None
        action()

    def __del__(self) -> None:
        failed = None if self._action is None else self._failed()
        if failed is not None:
            failed()


def _refuse_compiled_autograd() -> None:
    if compiles_autograd():
        raise RuntimeError(
            "compiled autograd does not call pycomm's hooks during backward(): turn it off "
            "(torch._dynamo.config.compiled_autograd = False); torch.compile of the model is fine"
        )


class GradientHook:
    """Hook that calls ``method(owner, slot)`` when the gradient of ``param`` has been accumulated.

    While ``gate`` is open, ``counter`` counts instead, in the extension. Both references are weak: the garbage
    collector does not see a parameter's hooks, so it would never collect a cycle through them.
    """

    def __init__(
        self,
        owner: Any,
        method: Callable[[Any, Any], None],
        slot: Any,
        param: torch.Tensor,
        gate: PassGate,
    ) -> None:
        self.counter = GradientCounter(gate)
        self._owner, self._slot, self._method = weakref.ref(owner), weakref.ref(slot), method
        self._name = slot.name
        for hook in map(handler_of, list(accumulation_hooks(param).values())):
            if isinstance(hook, GradientHook) and hook.orphaned:  # of an optimizer that no longer exists
                hook.remove()
        register: Any = param.register_post_accumulate_grad_hook
        self._handle = register(self.counter.hook(self))

    def __call__(self, param: torch.Tensor) -> None:
        owner, slot = self._owner(), self._slot()
        if owner is None or slot is None:
            raise RuntimeError(
                f"the gradient of {self._name!r} is no longer averaged: the optimizer that was attached is gone; "
                "attach() the one that you use now"
            )
        self._method(owner, slot)

    @property
    def orphaned(self) -> bool:
        return self._owner() is None

    def is_first(self, param: torch.Tensor) -> bool:
        """Return whether no other hook of ``param``, which might remove the gradient, is called before this one."""
        return bool(next(iter(accumulation_hooks(param))) == self._handle.id)

    def is_last(self, param: torch.Tensor) -> bool:
        """Return whether no other hook of ``param``, which might change the gradient, is called after this one."""
        hooks = accumulation_hooks(param)
        return len(hooks) == 1 or next(reversed(hooks)) == self._handle.id

    def remove(self) -> None:
        self._handle.remove()
