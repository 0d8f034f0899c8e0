"""Hooks that pycomm leaves on models and parameters. None of them keeps the rest of pycomm alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from pycomm.counting import GradientCounter
from pycomm.reducer.uncovered import Uncovered
from pycomm.torch_internals import accumulation_hooks, leave_out_of_scripts


class ForwardHook:
    """Pre-hook of a module's forward. A copy of the module (``deepcopy``, ``pickle``) gets one that does nothing.

    It also does nothing in a forward that torch.compile traces; what it would find is found when backward
    begins, or before the step.
    """

    def __init__(self, before_forward: Callable[[], None] | None) -> None:
        self._before_forward = before_forward

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        if self._before_forward is not None:
            self._before_forward()

    def __deepcopy__(self, memo: object) -> ForwardHook:
        return ForwardHook(None)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[None]]:
        return ForwardHook, (None,)


leave_out_of_scripts(ForwardHook)


class Watcher(Protocol):
    """Object that a module's hooks keep alive, and call before its forward."""

    def before_forward(self) -> None: ...
    def knows(self, param: torch.Tensor) -> bool: ...


class ModelHooks:
    """Hooks on an optimizer and its module. They hold strong references to the objects they call.

    Args:
        before_step: called before each step, but after its closure.
        stepped: called before a closure runs for the first time.
        watcher: object to call before each forward of the module.
        after_step: called after each step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: torch.nn.Module | None,
        before_step: Callable[[], None],
        stepped: Callable[[], None],
        watcher: Watcher,
        after_step: Callable[[], None] | None = None,
    ) -> None:
        self._handles: list[Any] = [optimizer.register_step_pre_hook(step_hook(before_step, stepped))]
        if after_step is not None:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: after_step()))
        self._uncovered: Uncovered | None = None
        if module is not None:
            self._handles.append(module.register_forward_pre_hook(ForwardHook(watcher.before_forward)))
            self._uncovered = Uncovered(module, watcher.knows)

    def warn_of_uncovered(self) -> None:
        """Warn once of gradients that nobody averages."""
        if self._uncovered is not None:
            self._uncovered.warn()

    def remove(self) -> None:
        """Remove the hooks from the optimizer and the module."""
        for handle in self._handles:
            handle.remove()
        if self._uncovered is not None:
            self._uncovered.close()


def step_hook(check: Callable[[], None], begin: Callable[[], None]) -> Callable[..., Any]:
    """Return a pre-hook for ``optimizer.step`` that calls ``check``, after each run of the closure if there is one.

    A closure runs the last backward pass of a window itself. ``begin`` is called before its first run, because
    some optimizers (SAM) use the existing gradients first and only then ask for new ones.
    """

    def hook(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            check()
            return None
        begin()
        evaluate: Callable[[], Any] = closure

        def checked_closure() -> Any:
            loss = evaluate()
            check()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": checked_closure}
        return (args[0], checked_closure, *args[2:]), kwargs

    return hook


class GradientHook:
    """Hook that calls ``method(owner, slot)`` when the gradient of ``param`` has been accumulated, or counts it.

    It counts, with ``counter``, where nothing else is to be done. Both references are weak: the garbage collector
    does not see a parameter's hooks, so it would never collect a cycle that runs through them.
    """

    def __init__(
        self,
        owner: Any,
        method: Callable[[Any, Any], None],
        slot: Any,
        param: torch.Tensor,
        counter: GradientCounter,
    ) -> None:
        self._count = counter.count
        self._owner, self._slot, self._method = weakref.ref(owner), weakref.ref(slot), method
        self._name = slot.name
        _drop_orphans(param)
        register: Any = param.register_post_accumulate_grad_hook
        self._handle = register(self)

    def __call__(self, _param: torch.Tensor) -> None:
        if not torch.compiler.is_compiling() and self._count():
            return
        owner, slot = self._owner(), self._slot()
        if owner is None or slot is None:
            raise RuntimeError(
                f"the gradient of {self._name!r} is no longer averaged: the optimizer that was attached is gone; "
                "attach() the one that you use now"
            )
        self._method(owner, slot)

    @property
    def orphaned(self) -> bool:
        """Return whether the owner no longer exists."""
        return self._owner() is None

    def is_last(self, param: torch.Tensor) -> bool:
        """Return whether no other hook of ``param``, which might change the gradient, is called after this one."""
        hooks = accumulation_hooks(param)
        return len(hooks) == 1 or next(reversed(hooks)) == self._handle.id

    def remove(self) -> None:
        """Remove the hook from its parameter."""
        self._handle.remove()


def _drop_orphans(param: torch.Tensor) -> None:
    """Remove the hooks of optimizers that no longer exist from ``param``, which is about to be attached again."""
    for hook in list(accumulation_hooks(param).values()):
        if isinstance(hook, GradientHook) and hook.orphaned:
            hook.remove()
